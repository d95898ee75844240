"""The summary agent: tells a colleague in a few lines who asks for what. It calls two other agents for that."""

from __future__ import annotations

import asyncio
from typing import Any

from pydantic import BaseModel

from agent_reach import ReachClient, capability, register_agent
from examples.customer_service.agents.knowledge import Article
from examples.customer_service.agents.profiles import Profile
from examples.customer_service.text import Vectoriser


class Summary(BaseModel):
    """Who asks, the most telling of the customer's messages, and the articles that may answer it."""

    customer: str
    gist: str
    articles: list[str]


@register_agent(name="summary")
class Summariser:
    """Sums conversations up. `reach` is the client that serves it; it must be set before the first call."""

    reach: ReachClient

    @capability("conversation.summarise.v1", idempotent=True, timeout="heavy")
    async def summarise(self, customer_id: str, messages: list[str]) -> Summary:
        """Sum up a conversation: who asks for what, and which articles may help."""
        gist = _most_telling(messages)
        # Both at once. Request id, trace id and the time that is left travel along by themselves.
        profile, articles = await asyncio.gather(
            self.reach.call("profile.read.v1", {"customer_id": customer_id}),
            self.reach.call("knowledge.retrieve.v1", {"question": gist}, response_model=list[Article]),
        )
        return Summary(
            customer=_introduce(profile.data, customer_id), gist=gist, articles=[a.title for a in articles.data]
        )


def _most_telling(messages: list[str]) -> str:
    """The message whose words set it apart most from the others."""
    vectoriser = Vectoriser(messages)
    return max(messages, key=lambda message: len(vectoriser.vector(message)), default="")


def _introduce(found: dict[str, Any] | None, customer_id: str) -> str:
    if found is None:
        return f"unknown customer {customer_id}"
    profile = Profile.model_validate(found)
    return f"{profile.name}, {profile.plan} plan, {profile.country}, customer since {profile.customer_since}"
