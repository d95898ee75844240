"""What type checkers must see; checked by mypy and pyright, never run."""

from __future__ import annotations

from typing import Any, assert_type

from pydantic import BaseModel

from agent_reach import (
    AgentInfo,
    CallContext,
    Decision,
    Explanation,
    HedgeConfig,
    Outcome,
    Policy,
    ReachClient,
    ReachError,
    Reply,
    RetryConfig,
    Route,
    SyncReachClient,
    capability,
    register_agent,
)


class Article(BaseModel):
    title: str


@register_agent("knowledge.retrieve.v1", idempotent=True)
async def retrieve(query: str, limit: int = 5) -> list[str]:
    return [query] * limit


@register_agent("knowledge.count.v1")
def count(query: str, ctx: CallContext) -> int:
    return len(query + ctx.request_id)


@register_agent(name="kb")
class Knowledge:
    @capability("knowledge.read.v1")
    async def read(self, title: str) -> Article:
        return Article(title=title)


async def decorated_things_keep_their_types() -> None:
    assert_type(await retrieve("x", limit=1), list[str])
    assert_type(await Knowledge().read("x"), Article)


def a_sync_handler_keeps_its_type(ctx: CallContext) -> None:
    assert_type(count("x", ctx), int)


async def response_model_types_the_reply(reach: ReachClient) -> None:
    assert_type(await reach.call("a.b.v1", {"x": 1}), Reply[Any])
    assert_type(await reach.call("a.b.v1", Article(title="x"), response_model=Article), Reply[Article])
    assert_type((await reach.call("a.b.v1", response_model=Article, timeout=2.0)).data, Article)
    assert_type(await reach.call("a.b.v1", response_model=list[str]), Reply[list[str]])
    # A union is no type[T]; it is checked at run time and typed as Any.
    assert_type(await reach.call("a.b.v1", response_model=Article | None), Reply[Any])


async def a_route_can_be_called(reach: ReachClient) -> None:
    route = await reach.resolve("a.b.v1")
    assert_type(route, Route)
    assert_type(reach.explain("a.b.v1"), Explanation)
    assert_type(await reach.call(route, {}), Reply[Any])
    assert_type(reach.agents(), tuple[AgentInfo, ...])


async def how_a_call_is_routed_changes_no_type(reach: ReachClient) -> None:
    assert_type(await reach.call("a.b.v1", policy=Policy.TOOL, strategy="round_robin"), Reply[Any])
    assert_type(
        await reach.call("a.b.v1", response_model=Article, hedge=HedgeConfig(), retry=RetryConfig(max_attempts=1)),
        Reply[Article],
    )
    assert_type(await reach.call("a.b.v1", context_id="c", require_context=True), Reply[Any])
    route = await reach.resolve("a.b.v1", context_id="c")
    assert_type(route.owner, str | None)
    assert_type(route.context_lost, str | None)
    assert_type(reach.decisions(), tuple[Decision, ...])
    assert_type(Policy.CRITICAL, Policy)


async def a_fan_out_has_an_outcome_for_each(reach: ReachClient, sync: SyncReachClient) -> None:
    outcomes = await reach.fan_out("a.b.v1", {"x": 1}, 3, response_model=Article)
    assert_type(outcomes, list[Outcome[Any]])
    assert_type(outcomes[0].reply, Reply[Any] | None)
    assert_type(outcomes[0].error, ReachError | None)
    assert_type(sync.fan_out("a.b.v1", n=2), list[Outcome[Any]])
    assert_type(sync.decisions("a.b.v1"), tuple[Decision, ...])
    assert_type(sync.resolve("a.b.v1", context_id="c"), Route)
    assert_type(sync.call("a.b.v1", policy=Policy.CRITICAL, strategy="single"), Reply[Any])


def the_sync_client_has_the_same_types(reach: SyncReachClient) -> None:
    assert_type(reach.call("a.b.v1", response_model=Article), Reply[Article])
    assert_type(reach.call("a.b.v1", {}), Reply[Any])
    with SyncReachClient("x", registry="memory://x") as entered:
        assert_type(entered, SyncReachClient)
