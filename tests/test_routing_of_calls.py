"""What a caller notices of the routing: second copies, policies, conversations, fan-out and decisions, on a real
`ReachClient` with virtual time.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agent_reach import (
    AgentNotFound,
    BreakerConfig,
    CallContext,
    ConfigError,
    ContextLost,
    DeadlineExceeded,
    EjectionConfig,
    HedgeConfig,
    InvalidPayload,
    MemoryRegistry,
    NoHealthyAgent,
    OutcomeUnknown,
    Overloaded,
    Policy,
    ReachClient,
    ReachConfig,
    RemoteError,
    RetryConfig,
    ScoreWeights,
    ScoringConfig,
    register_agent,
)
from agent_reach.config import BulkheadConfig
from agent_reach.events import BreakerChanged, CallEnded
from agent_reach.ports import Answer, DialRequest, DialResult, MaybeExecuted, NeverSent
from agent_reach.routing.breaker import BreakerState
from agent_reach.testing import ManualClock
from tests.routing.world import CAPABILITY, agent
from tests.test_client import Script, Seen, good, put

HEDGE = HedgeConfig()


def target(request: DialRequest) -> str:
    """Whom a request is meant for."""
    return str(json.loads(request.body)["target_agent"])


def targets(script: Script) -> list[str]:
    return [target(request) for request in script.requests]


class Stage:
    """Instances that answer after so many virtual seconds, or as a function says; and a client that calls them."""

    def __init__(self, *names: str, config: ReachConfig | None = None, **record: Any) -> None:
        self.clock = ManualClock(100.0)
        self.registry = MemoryRegistry(self.clock)
        self.takes: dict[str, float] = dict.fromkeys(names, 0.01)
        self.acts: dict[str, Callable[[DialRequest], DialResult]] = {}
        # Attempts that were cancelled, and those that answered, by instance.
        self.cancelled: Counter[str] = Counter()
        self.answered: Counter[str] = Counter()
        self.script = Script(self._answer)
        self.seen = Seen()
        put(self.registry, *(agent(name, **record) for name in names))
        self.reach = ReachClient(
            "caller", registry=self.registry, dialer=self.script, config=config, observers=[self.seen]
        )

    async def _answer(self, request: DialRequest) -> DialResult:
        name = target(request)
        try:
            await self.clock.sleep(self.takes[name])
        except asyncio.CancelledError:
            self.cancelled[name] += 1
            raise
        self.answered[name] += 1
        return self.acts[name](request) if name in self.acts else good(request)

    def call(self, **keywords: Any) -> asyncio.Task[Any]:
        return asyncio.get_running_loop().create_task(self.reach.call(CAPABILITY, **keywords))

    async def answers(self, calls: int, **keywords: Any) -> None:
        """So many calls, one after another, that all end well."""
        for _ in range(calls):
            task = self.call(**keywords)
            await self.clock.advance(0.01)
            await task

    def in_flight(self) -> tuple[int, int, dict[str, int]]:
        """Calls in flight: to instances, of capabilities, of tiers."""
        router = self.reach._knowledge.router
        instances = router.index.instances.values()
        learnt = [learnt for instance in instances for learnt in instance._learnt.values()]
        return sum(i.in_flight for i in instances), sum(one.in_flight for one in learnt), router.in_flight


NOTHING: tuple[int, int, dict[str, int]] = (0, 0, {})


@contextlib.asynccontextmanager
async def leaving_no_task(clock: ManualClock) -> AsyncIterator[None]:
    """Whatever runs inside must have ended, or been cancelled, when it is over.

    By what they run, as the registry's own tasks end and begin anew while the clock is turned.
    """

    def running() -> Counter[str]:
        return Counter(str(getattr(task.get_coro(), "__qualname__", "")) for task in asyncio.all_tasks())

    before = running()
    yield
    await clock.settle()
    assert running() - before == Counter()


# --- second copies -------------------------------------------------------------------------------------------


async def test_a_slow_call_is_answered_by_its_second_copy_and_the_slow_one_is_cancelled() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        stage.takes = {"a": 4.0, "b": 0.01}
        began = stage.clock.now()
        # A route names the slow one first.
        route = await stage.reach.resolve(CAPABILITY)
        first = route.candidates[0].agent_id
        stage.takes = {name: 4.0 if name == first else 0.01 for name in ("a", "b")}
        task = asyncio.ensure_future(stage.reach.call(route, hedge=HEDGE))
        await stage.clock.advance(0.005)
        assert targets(stage.script)[40:] == [first], "it isn't slow yet"
        await stage.clock.advance(0.025)
        reply = await task
        other = {"a": "b", "b": "a"}[first]
        assert reply.agent_id == other
        assert reply.elapsed_s == pytest.approx(0.02, abs=0.001)
        assert targets(stage.script)[40:] == [first, other]
        assert (stage.cancelled, stage.in_flight()) == ({first: 1}, NOTHING)
        assert stage.clock.now() - began < 0.1
    numbers = [json.loads(request.body)["attempt"] for request in stage.script.requests[40:]]
    ids = {json.loads(request.body)["request_id"] for request in stage.script.requests[40:]}
    assert (numbers, len(ids)) == ([1, 2], 1)


async def test_a_first_copy_that_answers_after_all_wins_and_the_second_one_is_cancelled() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        stage.takes = {"a": 0.03, "b": 0.03}
        task = stage.call(hedge=HEDGE)
        await stage.clock.advance(0.035)
        first, second = targets(stage.script)[40:]
        assert (await task).agent_id == first
        assert (stage.cancelled, stage.in_flight()) == ({second: 1}, NOTHING)


async def test_without_hedging_nothing_is_sent_twice_however_slow_it_is() -> None:
    stage = Stage("a", "b")
    async with stage.reach:
        await stage.answers(40)
        stage.takes = {"a": 4.0, "b": 4.0}
        task = stage.call()
        await stage.clock.advance(4.5)
        await task
        assert len(stage.script.requests) == 41


async def test_a_client_whose_settings_ask_for_it_sends_second_copies_of_all_its_idempotent_calls() -> None:
    for idempotent in (True, False):
        stage = Stage("a", "b", config=ReachConfig(hedge=HEDGE), idempotent=idempotent)
        async with stage.reach, leaving_no_task(stage.clock):
            await stage.answers(40)
            stage.takes = {"a": 0.5, "b": 0.5}
            task = stage.call()
            await stage.clock.advance(1)
            await task
        assert len(stage.script.requests) == (42 if idempotent else 41)


async def test_the_handler_of_the_slower_copy_is_cancelled_on_its_agent() -> None:
    registry = MemoryRegistry()
    ended: list[str] = []

    def handler(name: str, slow: asyncio.Event) -> Any:
        @register_agent(CAPABILITY, idempotent=True)
        async def work() -> str:
            if slow.is_set():
                try:
                    await asyncio.sleep(60)
                except asyncio.CancelledError:
                    ended.append(name)
                    raise
            return name

        return work

    slow = {name: asyncio.Event() for name in ("a", "b")}
    async with (
        ReachClient("a", handlers=[handler("a", slow["a"])], registry=registry),
        ReachClient("b", handlers=[handler("b", slow["b"])], registry=registry),
        ReachClient("caller", registry=registry) as reach,
    ):
        for _ in range(30):
            await reach.call(CAPABILITY)
        before = asyncio.all_tasks()
        first = (await reach.resolve(CAPABILITY)).candidates[0].agent_id
        slow[first].set()
        route = await reach.resolve(CAPABILITY)
        reply = await reach.call(route, hedge=HEDGE, timeout=20)
        assert reply.data != first
        for _ in range(100):
            await asyncio.sleep(0)
        assert ended == [first]
        assert asyncio.all_tasks() - before == set()
        instances = reach._knowledge.index.instances.values()
        assert [instance.in_flight for instance in instances] == [0, 0]
        assert [instance.breaker.state for instance in instances] == [BreakerState.CLOSED] * 2


async def test_when_the_first_copy_fails_the_second_one_answers() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        route = await stage.reach.resolve(CAPABILITY)
        first, second = (view.agent_id for view in route.candidates)
        stage.takes = {first: 0.03, second: 0.5}
        stage.acts[first] = lambda request: MaybeExecuted("connection reset")
        task = asyncio.ensure_future(stage.reach.call(route, hedge=HEDGE))
        await stage.clock.advance(0.1)
        assert not task.done()
        await stage.clock.advance(0.5)
        reply = await task
        assert reply.agent_id == second
        assert [attempt.outcome for attempt in reply.attempts] == ["maybe_executed", "ok"]
        assert stage.in_flight() == NOTHING


async def test_when_both_copies_fail_the_error_lists_both() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        stage.takes = {"a": 0.03, "b": 0.03}
        stage.acts = dict.fromkeys(("a", "b"), lambda request: MaybeExecuted("connection reset"))
        task = stage.call(hedge=HEDGE, retry=RetryConfig(max_attempts=2))
        await stage.clock.advance(1)
        with pytest.raises(NoHealthyAgent, match="never answered") as caught:
            await task
        assert {attempt.agent_id for attempt in caught.value.attempts} == {"a", "b"}
        assert stage.in_flight() == NOTHING


async def test_a_deadline_ends_both_copies() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        ends_at = stage.clock.now() + 1.0

        async def hang(request: DialRequest) -> DialResult:
            await stage.clock.sleep(request.timeout_s)
            return MaybeExecuted(f"no answer within {request.timeout_s:g} s", timed_out=True)

        stage.script.act = hang
        task = stage.call(hedge=HEDGE, timeout=1.0)
        await stage.clock.advance(1.01)
        with pytest.raises(DeadlineExceeded):
            await task
        assert len(stage.script.requests) == 42
        assert stage.clock.now() <= ends_at + 0.02
        assert stage.in_flight() == NOTHING


async def test_a_caller_that_gives_up_cancels_both_copies() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        stage.takes = {"a": 4.0, "b": 4.0}
        task = stage.call(hedge=HEDGE)
        await stage.clock.advance(0.5)
        assert stage.in_flight()[0] == 2
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (stage.cancelled, stage.in_flight()) == ({"a": 1, "b": 1}, NOTHING)
        assert [event.outcome for event in stage.seen.of(CallEnded)][-1] == "Cancelled"


async def test_a_fault_of_the_dialer_in_a_second_copy_is_heard_and_leaves_nothing_behind() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)
        stage.takes = {"a": 0.03, "b": 0.01}

        def broken(request: DialRequest) -> DialResult:
            raise ZeroDivisionError("a bug")

        route = await stage.reach.resolve(CAPABILITY)
        first, second = (view.agent_id for view in route.candidates)
        stage.takes = {first: 1.0, second: 0.01}
        stage.acts[second] = broken
        task = asyncio.ensure_future(stage.reach.call(route, hedge=HEDGE))
        await stage.clock.advance(0.1)
        with pytest.raises(ZeroDivisionError):
            await task
        assert (stage.cancelled, stage.in_flight()) == ({first: 1}, NOTHING)


# --- policies ------------------------------------------------------------------------------------------------


async def test_a_keyword_goes_before_the_policy_and_the_policy_before_the_settings() -> None:
    config = ReachConfig(retry=RetryConfig(max_attempts=4, base_s=0.0, tree_allowance=64, budget_least=100))

    async def attempts(**keywords: Any) -> int:
        stage = Stage("a", "b", "c", "d", "e", config=config)
        stage.acts = dict.fromkeys(stage.takes, lambda request: MaybeExecuted("reset"))
        async with stage.reach:
            task = stage.call(**keywords)
            await stage.clock.advance(5)
            with pytest.raises(NoHealthyAgent):
                await task
        return len(stage.script.requests)

    two = Policy(retry=RetryConfig(max_attempts=2, base_s=0.0, tree_allowance=64))
    three = RetryConfig(max_attempts=3, base_s=0.0, tree_allowance=64)
    assert await attempts() == 4
    assert await attempts(policy=two) == 2
    assert await attempts(policy=two, retry=three) == 3
    assert await attempts(policy=Policy(strategy="round_robin")) == 4, "what a policy leaves out stays"


async def test_the_strategy_of_a_call_goes_before_its_policys_and_that_before_the_settings() -> None:
    stage = Stage("a", "b", "c", config=ReachConfig(strategy="weighted_random"))
    async with stage.reach:
        for keywords, expected in (
            ({}, "weighted_random"),
            ({"policy": Policy(strategy="round_robin")}, "round_robin"),
            ({"policy": Policy(strategy="round_robin"), "strategy": "single"}, "single"),
        ):
            await stage.answers(1, **keywords)
            assert stage.reach.decisions()[-1].rule == expected


async def test_critical_calls_are_sent_once_and_the_fallback_answers_at_once() -> None:
    stage = Stage("a", "b")
    stage.acts = dict.fromkeys(("a", "b"), lambda request: MaybeExecuted("reset"))
    async with stage.reach:
        began = stage.clock.now()
        task = stage.call(policy=Policy.CRITICAL, fallback=lambda error: type(error).__name__)
        await stage.clock.advance(0.01)
        reply = await task
        assert (reply.data, reply.from_fallback) == ("NoHealthyAgent", True)
        assert len(stage.script.requests) == 1
        assert stage.clock.now() - began <= 0.011, "no pause, no second attempt"


async def test_two_failures_of_critical_calls_shut_an_instance_out_where_others_need_five() -> None:
    for policy, needed in ((Policy.CRITICAL, 2), (None, 5), (Policy(trip_after=3), 3)):
        stage = Stage("a", "b")
        stage.acts["a"] = lambda request: MaybeExecuted("reset")
        async with stage.reach:
            failures = 0
            while not stage.seen.of(BreakerChanged):
                task = stage.call(agent_id="a", policy=policy, retry=RetryConfig(max_attempts=1))
                await stage.clock.advance(0.01)
                with pytest.raises(NoHealthyAgent):
                    await task
                failures += 1
            assert failures == needed
            assert stage.seen.of(BreakerChanged)[0].reason == f"{needed} failures in a row"


async def test_tool_calls_get_a_second_copy_and_analyses_one_repeat_after_a_pause() -> None:
    stage = Stage("a", "b")
    async with stage.reach:
        await stage.answers(40)
        stage.takes = {"a": 0.5, "b": 0.5}
        task = stage.call(policy=Policy.TOOL)
        await stage.clock.advance(1)
        await task
        assert len(stage.script.requests) == 42
        stage.acts = dict.fromkeys(("a", "b"), lambda request: MaybeExecuted("reset"))
        task = stage.call(policy=Policy.ANALYSIS)
        await stage.clock.advance(4)
        with pytest.raises(NoHealthyAgent):
            await task
        assert len(stage.script.requests) == 44


@pytest.mark.parametrize(
    "keywords",
    [
        {"policy": "critical"},
        {"policy": Policy},
        {"policy": RetryConfig()},
        {"hedge": True},
        {"hedge": 0.95},
        {"retry": HedgeConfig()},
        {"strategy": "fastest"},
        {"require_context": True},
        {"context_id": ""},
        {"context_id": 7},
    ],
    ids=str,
)
async def test_a_wrong_setting_of_a_call_is_refused_by_name_before_anything_is_sent(keywords: Any) -> None:
    stage = Stage("a")
    async with stage.reach:
        with pytest.raises(ConfigError, match=next(iter(keywords))):
            await stage.reach.call(CAPABILITY, **keywords)
    assert stage.script.requests == []


# --- conversations -------------------------------------------------------------------------------------------


async def test_a_conversation_stays_with_one_instance_and_the_route_says_with_which() -> None:
    stage = Stage("a", "b", "c", "d")
    async with stage.reach:
        route = await stage.reach.resolve(CAPABILITY, context_id="conv")
        await stage.answers(20, context_id="conv")
        assert set(targets(stage.script)) == {route.owner}
        assert route.candidates[0].agent_id == route.owner
        assert (await stage.reach.resolve(CAPABILITY)).owner is None
        assert {json.loads(request.body)["context_id"] for request in stage.script.requests} == {"conv"}
        owner = str(route.owner)
        put(stage.registry, agent(owner, incarnation="two"))
        await stage.clock.settle()
        lost = await stage.reach.resolve(CAPABILITY, context_id="conv")
        assert lost.context_lost == owner
        with pytest.raises(ContextLost, match=f"{owner!r} held this conversation"):
            await stage.reach.call(CAPABILITY, context_id="conv", require_context=True)
        assert len(stage.script.requests) == 20
        await stage.answers(1, context_id="conv")
        assert (await stage.reach.resolve(CAPABILITY, context_id="conv")).context_lost is None


async def test_a_lost_conversation_may_be_answered_by_the_fallback() -> None:
    stage = Stage("a", "b")
    async with stage.reach:
        await stage.answers(1, context_id="conv")
        put(stage.registry, agent(targets(stage.script)[0], incarnation="two"))
        await stage.clock.settle()
        reply = await stage.reach.call(
            CAPABILITY, context_id="conv", require_context=True, fallback=lambda error: type(error).__name__
        )
        assert reply.data == "ContextLost"


async def test_nested_calls_belong_to_the_conversation_of_the_call_that_they_serve() -> None:
    registry = MemoryRegistry()

    @register_agent("inner.see.v1")
    async def see(ctx: CallContext) -> str | None:
        return ctx.context_id

    async with contextlib.AsyncExitStack() as agents:
        reach = await agents.enter_async_context(ReachClient("caller", registry=registry))

        @register_agent("outer.ask.v1")
        async def ask(own: str | None = None) -> list[str]:
            reply = await reach.call("inner.see.v1", context_id=own)
            return [reply.agent_id, reply.data]

        for number in range(4):
            await agents.enter_async_context(ReachClient(f"inner-{number}", handlers=[see], registry=registry))
        await agents.enter_async_context(ReachClient("outer", handlers=[ask], registry=registry))
        told = [(await reach.call("outer.ask.v1", context_id="conv")).data for _ in range(20)]
        assert {context for _, context in told} == {"conv"}
        assert len({inner for inner, _ in told}) == 1
        assert told[0][0] == (await reach.resolve("inner.see.v1", context_id="conv")).owner
        own = (await reach.call("outer.ask.v1", {"own": "other"}, context_id="conv")).data
        assert own[1] == "other", "a call may be part of another conversation"


# --- fan-out -------------------------------------------------------------------------------------------------


async def test_fan_out_asks_different_instances_at_once_and_returns_one_outcome_each() -> None:
    stage = Stage("a", "b", "c", "d", "e")
    async with stage.reach, leaving_no_task(stage.clock):
        stage.takes = dict.fromkeys(stage.takes, 1.0)
        task = asyncio.ensure_future(stage.reach.fan_out(CAPABILITY, {"x": 1}, 3))
        await stage.clock.advance(1.0)
        outcomes = await task
        assert len({outcome.agent_id for outcome in outcomes}) == 3
        assert all(outcome.ok and outcome.error is None for outcome in outcomes)
        assert [outcome.reply.agent_id for outcome in outcomes if outcome.reply] == [o.agent_id for o in outcomes]
        assert {json.dumps(json.loads(r.body)["payload"]) for r in stage.script.requests} == {'{"x": 1}'}
        assert len(await _now(stage, stage.reach.fan_out(CAPABILITY))) == 3, "three is the usual number"
        assert len(await _now(stage, stage.reach.fan_out(CAPABILITY, n=99))) == 5


async def _now(stage: Stage, coroutine: Any, seconds: float = 1.0) -> Any:
    task = asyncio.ensure_future(coroutine)
    await stage.clock.advance(seconds)
    return await task


async def test_fan_out_asks_the_best_and_in_their_order() -> None:
    for _ in range(10):
        stage = Stage("a", "b", "c")
        async with stage.reach:
            stage.takes = {"a": 0.3, "b": 3.0, "c": 0.1}
            for name in stage.takes:
                await _now(stage, stage.reach.call(CAPABILITY, agent_id=name), 3.5)
            outcomes = await _now(stage, stage.reach.fan_out(CAPABILITY, n=2))
            assert [outcome.agent_id for outcome in outcomes] == ["c", "a"]


async def test_fan_out_fills_up_with_those_that_are_out() -> None:
    stage = Stage("a", "b", "c")
    async with stage.reach:
        breaker = stage.reach._knowledge.index.instances["a"].breaker
        breaker.state, breaker.until = BreakerState.OPEN, 1e9
        outcomes = await _now(stage, stage.reach.fan_out(CAPABILITY, n=2))
        assert {outcome.agent_id for outcome in outcomes} == {"b", "c"}
        outcomes = await _now(stage, stage.reach.fan_out(CAPABILITY, n=3))
        assert outcomes[-1].agent_id == "a"


async def test_fan_out_tells_of_partial_failure_as_data() -> None:
    stage = Stage("a", "b", "c", idempotent=False)
    stage.acts["b"] = lambda request: MaybeExecuted("reset")
    async with stage.reach:
        outcomes = {o.agent_id: o for o in await _now(stage, stage.reach.fan_out(CAPABILITY))}
        assert [outcomes[name].ok for name in ("a", "b", "c")] == [True, False, True]
        assert isinstance(outcomes["b"].error, OutcomeUnknown)
        assert outcomes["b"].reply is None


async def test_retries_of_a_fan_out_stay_with_their_instance() -> None:
    stage = Stage("a", "b", "c")
    stage.acts["b"] = lambda request: NeverSent("connect", "refused")
    async with stage.reach:
        retry = RetryConfig(max_attempts=3, base_s=0.01)
        outcomes = {o.agent_id: o for o in await _now(stage, stage.reach.fan_out(CAPABILITY, retry=retry))}
        assert isinstance(outcomes["b"].error, NoHealthyAgent)
        assert [attempt.agent_id for attempt in outcomes["b"].error.attempts] == ["b"] * 3
        assert Counter(targets(stage.script)) == {"a": 1, "b": 3, "c": 1}


async def test_fan_out_gives_all_of_them_the_same_time_and_checks_what_they_say() -> None:
    stage = Stage("a", "b")
    stage.acts["b"] = lambda request: good(request, data=7)
    async with stage.reach:
        outcomes = {
            o.agent_id: o
            for o in await _now(stage, stage.reach.fan_out(CAPABILITY, n=2, timeout=2.5, response_model=str))
        }
        assert {request.timeout_s for request in stage.script.requests} <= {2.5}
        assert (outcomes["a"].ok, type(outcomes["b"].error).__name__) == (True, "InvalidReply")


@pytest.mark.parametrize("n", [0, -1, 1.5, "3", True, None])
async def test_fan_out_to_no_number_of_instances_is_refused(n: Any) -> None:
    stage = Stage("a")
    async with stage.reach:
        with pytest.raises(ConfigError, match=r"n=.* must be a whole number >= 1"):
            await stage.reach.fan_out(CAPABILITY, n=n)
    assert stage.script.requests == []


async def test_fan_out_raises_what_concerns_all_of_them() -> None:
    stage = Stage("a")
    async with stage.reach:
        with pytest.raises(AgentNotFound):
            await stage.reach.fan_out("nobody.offers.v1")
        with pytest.raises(InvalidPayload):
            await stage.reach.fan_out(CAPABILITY, {"x": float("nan")})
        with pytest.raises(ConfigError, match="strategy"):
            await stage.reach.fan_out(CAPABILITY, strategy="all")  # type: ignore[arg-type]
    assert stage.script.requests == []


async def test_cancelling_a_fan_out_cancels_all_of_it() -> None:
    stage = Stage("a", "b", "c")
    stage.takes = dict.fromkeys(stage.takes, 4.0)
    async with stage.reach, leaving_no_task(stage.clock):
        task = asyncio.ensure_future(stage.reach.fan_out(CAPABILITY))
        await stage.clock.advance(0.5)
        assert stage.in_flight()[0] == 3
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert (stage.cancelled, stage.in_flight()) == ({"a": 1, "b": 1, "c": 1}, NOTHING)


async def test_a_fan_out_moves_no_conversation() -> None:
    registry = MemoryRegistry()

    @register_agent("inner.see.v1", idempotent=True)
    async def see() -> str:
        return "seen"

    async with contextlib.AsyncExitStack() as agents:
        reach = await agents.enter_async_context(ReachClient("caller", registry=registry))

        @register_agent("outer.ask.v1")
        async def ask(everybody: bool) -> str:
            if everybody:
                return str(len(await reach.fan_out("inner.see.v1", n=4)))
            return (await reach.call("inner.see.v1")).agent_id

        for number in range(4):
            await agents.enter_async_context(ReachClient(f"inner-{number}", handlers=[see], registry=registry))
        await agents.enter_async_context(ReachClient("outer", handlers=[ask], registry=registry))
        owner = (await reach.call("outer.ask.v1", {"everybody": False}, context_id="conv")).data
        assert (await reach.call("outer.ask.v1", {"everybody": True}, context_id="conv")).data == "4"
        assert (await reach.call("outer.ask.v1", {"everybody": False}, context_id="conv")).data == owner


# --- decisions, zones, tiers and scores, as far as a client's own wiring goes ----------------------------------


async def test_decisions_tell_where_each_attempt_went_and_how_old_the_knowledge_was() -> None:
    stage = Stage("a", "b")
    stage.acts = {"a": lambda request: NeverSent("connect", "refused")}
    async with stage.reach:
        while not any(name == "a" for name in targets(stage.script)):
            await _now(stage, stage.reach.call(CAPABILITY))
        told = stage.reach.decisions(CAPABILITY)
        assert [decision.chosen for decision in told] == targets(stage.script)
        assert {decision.request_id for decision in told} == {
            json.loads(request.body)["request_id"] for request in stage.script.requests
        }
        assert told[-1].age_s is not None
        assert told[-1].age_s < 60
        assert "a: out, breaker open: nothing listens at its address for" in str(told[-1])
        assert stage.reach.decisions("other.thing.v1") == ()
        with pytest.raises(ConfigError):
            stage.reach.decisions("no capability")


async def test_a_client_in_a_zone_calls_its_neighbours() -> None:
    registry = MemoryRegistry()
    put(registry, *(agent(f"far{n}", zone="us/a") for n in range(5)), agent("near", zone="eu/a"))
    script = Script(good)
    async with ReachClient(registry=registry, dialer=script, zone="eu/a") as reach:
        for _ in range(20):
            await reach.call(CAPABILITY)
    assert set(targets(script)) == {"near"}


async def test_a_full_tier_is_waited_for_and_named() -> None:
    stage = Stage("a", "b", config=ReachConfig(bulkheads=BulkheadConfig(per_tier=2)))
    stage.takes = {"a": 0.8, "b": 4.0}
    async with stage.reach, leaving_no_task(stage.clock):
        held = [stage.call(agent_id=name) for name in ("a", "b")]
        await stage.clock.settle()
        stage.takes["a"] = 4.0
        waits = stage.call(agent_id="a")
        await stage.clock.advance(0.7)
        assert len(stage.script.requests) == 2
        await stage.clock.advance(0.2)
        assert len(stage.script.requests) == 3, "its turn came when a call of the tier ended"
        refused = stage.call()
        await stage.clock.advance(1.1)
        with pytest.raises(Overloaded, match=r"2 calls of tier 'interactive' in flight.*BulkheadConfig\.per_tier"):
            await refused
        await stage.clock.advance(4)
        await asyncio.gather(*held, waits)
        assert stage.in_flight() == NOTHING


async def test_a_weighted_score_is_explained_part_by_part() -> None:
    config = ReachConfig(scoring=ScoringConfig(weights=ScoreWeights.BALANCED))
    stage = Stage("a", "b", config=config)
    async with stage.reach:
        text = str(stage.reach.explain(CAPABILITY))
        assert "missing to success 1.00 x 0.4 + load 1.00 x 0.3 + locality 0.00 x 0.2 + weight 1.00 x 0.1" in text


async def test_an_outage_of_everybody_makes_a_fifth_more_load_where_nobody_waits_for_its_end() -> None:
    config = ReachConfig(
        retry=RetryConfig(base_s=0.0, patience_s=0.0),
        breaker=BreakerConfig(consecutive_failures=10**6, min_calls=10**6),
        ejection=EjectionConfig(max_share=0.0),
    )
    registry = MemoryRegistry()
    put(registry, agent("a"), agent("b"), agent("c"))
    script = Script(lambda request: MaybeExecuted("reset"))
    clock = ManualClock()
    async with ReachClient(registry=registry, dialer=script, config=config, clock=clock) as reach:
        errors = []
        for _ in range(200):
            try:
                await reach.call(CAPABILITY)
            except NoHealthyAgent as error:
                errors.append(str(error))
    assert len(script.requests) <= 200 * 1.2 + 3
    assert sum("not repeated: too many calls of this capability fail" in text for text in errors) > 100


@contextlib.asynccontextmanager
async def an_outage(*names: str) -> AsyncIterator[Stage]:
    """A stage whose client has just seen 30 calls fail; whatever is begun in it must have ended when it is over."""
    stage = Stage(*names)
    stage.acts = dict.fromkeys(names, lambda request: MaybeExecuted("reset"))
    async with stage.reach:
        for _ in range(30):
            task = stage.call(retry=RetryConfig(max_attempts=1, patience_s=0.0))
            await stage.clock.advance(0.01)
            with pytest.raises(NoHealthyAgent):
                await task
        yield stage
        assert stage.in_flight() == NOTHING


def failure(call: asyncio.Task[Any]) -> NoHealthyAgent:
    error = call.exception()
    assert isinstance(error, NoHealthyAgent)
    return error


async def test_while_all_fail_calls_wait_and_are_answered_soon_after_it_is_over() -> None:
    async with an_outage("a", "b", "c") as stage:
        before = len(stage.script.requests)
        calls = [stage.call() for _ in range(100)]
        await stage.clock.advance(2.0)
        # The probes are the calls' own attempts; one that may make no more ends.
        assert sum(call.done() for call in calls) <= 3
        assert all(len(failure(call).attempts) >= 2 for call in calls if call.done())
        assert 4 <= len(stage.script.requests) - before <= 9, "one probe every quarter to half a second"
        stage.acts = {}
        await stage.clock.advance(0.6)
        replies = [await call for call in calls if not call.done() or call.exception() is None]
        assert len(replies) >= 97
        assert {reply.data for reply in replies} == {"fine"}


async def test_who_waited_in_vain_for_an_outage_to_end_is_told_so_or_answered_by_the_fallback() -> None:
    async with an_outage("a", "b") as stage:
        plain = [stage.call() for _ in range(40)]
        fallback = stage.call(fallback=lambda error: type(error).__name__)
        await stage.clock.advance(4.9)
        assert all(len(failure(call).attempts) >= 2 for call in plain if call.done())
        await stage.clock.advance(0.2)
        errors = [failure(call) for call in plain]
        unsent = [error for error in errors if not error.attempts]
        assert len(unsent) > 10
        assert all("waited 5 s for one to succeed. Nothing was executed" in str(error) for error in unsent)
        assert (await fallback).data == "NoHealthyAgent"


async def test_a_call_that_waits_for_an_outage_to_end_can_be_cancelled() -> None:
    async with an_outage("a", "b") as stage:
        calls = [stage.call() for _ in range(20)]
        await stage.clock.settle()
        sent = len(stage.script.requests)
        for call in calls:
            call.cancel()
        await stage.clock.advance(10.0)
        assert all(call.cancelled() for call in calls)
        assert len(stage.script.requests) == sent


async def test_a_critical_call_waits_for_no_outage_to_end() -> None:
    async with an_outage("a", "b") as stage:
        began = stage.clock.now()
        task = stage.call(policy=Policy.CRITICAL, fallback=lambda error: "own answer")
        await stage.clock.advance(0.01)
        assert (await task).data == "own answer"
        assert stage.clock.now() - began < 0.1


@pytest.mark.parametrize("keywords", [{"policy": Policy.CRITICAL}, {"timeout": 0.2}], ids=["critical", "short"])
async def test_who_stands_behind_those_that_wait_loses_no_time_of_its_own(keywords: dict[str, Any]) -> None:
    """Twenty calls wait already: a critical one goes past them, and a short one ends with its own time."""
    async with an_outage("a", "b") as stage:
        waiting = [stage.call() for _ in range(20)]
        await stage.clock.settle()
        began = stage.clock.now()
        task = stage.call(**keywords)
        while not task.done():
            await stage.clock.advance(0.01)
        assert isinstance(task.exception(), NoHealthyAgent | DeadlineExceeded)
        assert stage.clock.now() - began <= keywords.get("timeout", 0.1) + 0.02
        for call in waiting:
            call.cancel()
        await stage.clock.advance(1.0)


async def test_what_a_handler_raised_for_good_ends_a_hedged_call_at_once() -> None:
    stage = Stage("a", "b")
    async with stage.reach, leaving_no_task(stage.clock):
        await stage.answers(40)

        def failed(request: DialRequest) -> Answer:
            sent = json.loads(request.body)
            error = {"type": "ValueError", "message": "no", "executed": True, "retryable": False}
            body = {"code": 1, "error": error, "response_to": sent["request_id"], "agent_id": sent["target_agent"]}
            return Answer(500, {}, json.dumps(body).encode())

        stage.takes = {"a": 0.03, "b": 0.5}
        stage.acts = {"a": failed, "b": failed}
        route = await stage.reach.resolve(CAPABILITY)
        first, second = (view.agent_id for view in route.candidates)
        stage.takes = {first: 0.03, second: 0.5}
        task = asyncio.ensure_future(stage.reach.call(route, hedge=HEDGE))
        await stage.clock.advance(0.05)
        with pytest.raises(RemoteError, match="ValueError"):
            await task
        assert (stage.cancelled, stage.in_flight()) == ({second: 1}, NOTHING)
