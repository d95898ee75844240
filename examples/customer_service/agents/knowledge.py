"""The knowledge agent: finds the help-centre articles that answer a question."""

from __future__ import annotations

from functools import cache

from pydantic import BaseModel

from agent_reach import register_agent
from examples.customer_service import data
from examples.customer_service.text import Vector, Vectoriser, cosine


class Article(BaseModel):
    """An article and how well it fits the question, 0 to 1."""

    title: str
    text: str
    score: float


# A handler may be a plain function: it then runs in a thread, and a long search doesn't hold up other calls.
@register_agent("knowledge.retrieve.v1", name="knowledge", idempotent=True, max_concurrency=20)
def retrieve(question: str, limit: int = 3) -> list[Article]:
    """Find the articles that answer a question, best first; fewer than `limit` if no more have to do with it."""
    vectoriser, articles = _indexed()
    asked = vectoriser.vector(question)
    scored = [
        Article(title=title, text=text, score=round(cosine(asked, vector), 3)) for title, text, vector in articles
    ]
    scored.sort(key=lambda article: article.score, reverse=True)
    return [article for article in scored[:limit] if article.score > 0]


@cache
def _indexed() -> tuple[Vectoriser, list[tuple[str, str, Vector]]]:
    articles = data.articles()
    vectoriser = Vectoriser([f"{title} {text}" for title, text in articles])
    # A word of the title says more of an article than one of its text.
    return vectoriser, [(title, text, vectoriser.vector(f"{title} {title} {text}")) for title, text in articles]
