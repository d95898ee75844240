"""The intent agent: says what a customer wants."""

from __future__ import annotations

from functools import cache

from pydantic import BaseModel

from agent_reach import register_agent
from examples.customer_service import data
from examples.customer_service.text import Vector, Vectoriser, cosine, mean


class Intent(BaseModel):
    """What a message is about; `confidence` is 0 to 1, and `runner_up` the next best guess."""

    name: str
    confidence: float
    runner_up: str


@register_agent("intent.detect.v1", name="intent", idempotent=True, timeout="light")
async def detect(text: str) -> Intent:
    """Say what a customer's message is about."""
    vectoriser, centroids = _learnt()
    vector = vectoriser.vector(text)
    ranked = sorted(((cosine(vector, centroid), name) for name, centroid in centroids.items()), reverse=True)
    (confidence, name), (_, runner_up) = ranked[:2]
    return Intent(name=name, confidence=round(confidence, 3), runner_up=runner_up)


@cache
def _learnt() -> tuple[Vectoriser, dict[str, Vector]]:
    """One centroid for each intent, over its example phrases."""
    examples = data.examples()
    vectoriser = Vectoriser([phrase for phrases in examples.values() for phrase in phrases])
    return vectoriser, {name: mean(map(vectoriser.vector, phrases)) for name, phrases in examples.items()}
