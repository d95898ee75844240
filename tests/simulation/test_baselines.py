"""The baselines: the rules that define each, driven by hand."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

from agent_reach.errors import AgentNotFound, DeadlineExceeded, NoHealthyAgent, ReachError
from agent_reach.model import AgentInfo, LoadReport
from agent_reach.routing.index import Remove, Upsert
from agent_reach.routing.outcomes import Cancelled, LostAnswer, Outcome, Unreadable, Unsent
from agent_reach.routing.steps import Raise, Return, Send, Step, Wait
from agent_reach.testing.simulation.algorithms import Algorithm, CallRequest, Session
from tests.routing.world import CAPABILITY, agent, ok, rejected
from tests.simulation.baselines import BASELINES
from tests.simulation.baselines.common import Baseline, Rules
from tests.simulation.baselines.cooldown import Cooldown
from tests.simulation.baselines.finagle import Accrual, RetryBudget, WindowedSum

ROUND_ROBIN, REGISTRY, LITELLM, GRPC, FINAGLE, ADDITIVE = BASELINES
REFUSED = Unsent("connect", "connection refused")
RESET = LostAnswer("connection reset")
TIMED_OUT = LostAnswer("no answer", timed_out=True)
BROKEN = rejected(500)
BUSY = rejected(429, "Overloaded", executed=False)


class Client:
    """One client of a baseline, and the time."""

    def __init__(self, algorithm: str | Algorithm, *infos: AgentInfo, zone: str | None = None) -> None:
        made = BASELINES[algorithm](random.Random(1), zone) if isinstance(algorithm, str) else algorithm
        self.algorithm = made
        self.now = 0.0
        self._revision = 0
        for info in infos:
            self.put(info)

    def put(self, info: AgentInfo) -> None:
        self._revision += 1
        self.algorithm.apply(Upsert(info, self._revision), self.now)

    def drop(self, agent_id: str) -> None:
        self._revision += 1
        self.algorithm.apply(Remove(agent_id, self._revision), self.now)

    def open(self, **request: Any) -> Session:
        session = self.algorithm.open(
            CallRequest(capability=CAPABILITY, request_id="r", started=self.now, **request)
        )
        assert session is not None
        return session

    def send(self, session: Session | None = None) -> tuple[Session, Send]:
        session = session or self.open()
        step = session.next(self.now)
        assert isinstance(step, Send), step
        return session, step

    def call(
        self, answer: Outcome | dict[str, Outcome] | Callable[[str], Outcome], took: float = 0.0, **request: Any
    ) -> tuple[Step, list[str], list[float]]:
        """Drive a call to its end. Returns the end, whom it asked, and the pauses."""
        session = self.open(**request)
        asked: list[str] = []
        pauses: list[float] = []
        while True:
            step = session.next(self.now)
            match step:
                case Send():
                    asked.append(step.candidate.agent_id)
                    self.now += min(took, step.timeout_s)
                    outcome = answer(asked[-1]) if callable(answer) else answer
                    session.record(outcome[asked[-1]] if isinstance(outcome, dict) else outcome, self.now, step)
                case Wait(seconds):
                    pauses.append(seconds)
                    self.now += seconds
                case _:
                    return step, asked, pauses


def agents(count: int, **fields: Any) -> list[AgentInfo]:
    return [agent(f"a{i}", **fields) for i in range(count)]


def error_of(step: Step) -> ReachError:
    assert isinstance(step, Raise), step
    return step.error


def shares(client: Client, calls: int, answer: Outcome) -> Counter[str]:
    return Counter(client.call(answer)[1][0] for _ in range(calls))


# --- what holds for all of them ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BASELINES)
def test_a_call_returns_its_answer_and_gives_its_place_back(name: str) -> None:
    client = Client(name, *agents(3))
    session, send = client.send()
    assert (send.number, send.timeout_s, send.retry_allowance) == (1, 5.0, 0)
    session.record(ok("a0"), 0.2, send)
    end = session.next(0.2)
    assert isinstance(end, Return)
    assert [attempt.outcome for attempt in end.attempts] == ["ok"]
    assert isinstance(client.algorithm, Baseline)
    rules = client.algorithm.rules_of(CAPABILITY)
    candidates = client.algorithm.index.lookup(CAPABILITY).candidates
    assert [rules.of(candidate, 0.2).in_flight for candidate in candidates] == [0, 0, 0]
    assert session.next(0.3) is end


@pytest.mark.parametrize("name", BASELINES)
def test_nobody_known_is_no_call_and_the_last_one_leaving_ends_it(name: str) -> None:
    client = Client(name)
    assert client.algorithm.open(CallRequest(capability=CAPABILITY, request_id="r", started=0.0)) is None
    client.put(agent("a0"))
    session = client.open()
    client.drop("a0")
    assert isinstance(error_of(session.next(0.0)), AgentNotFound)


@pytest.mark.parametrize("name", BASELINES)
def test_a_cancelled_call_ends_and_leaves_no_count_in_flight(name: str) -> None:
    client = Client(name, agent("a0"))
    end, asked, _ = client.call(Cancelled())
    assert len(asked) == 1
    assert "cancelled" in str(error_of(end))
    assert isinstance(client.call(ok())[0], Return)


@pytest.mark.parametrize("name", BASELINES)
@pytest.mark.parametrize("answer", [TIMED_OUT, RESET, REFUSED, BUSY, BROKEN], ids=lambda a: type(a).__name__)
def test_no_attempt_and_no_pause_goes_past_the_deadline(name: str, answer: Outcome) -> None:
    client = Client(name, *agents(4))
    end, asked, _ = client.call(answer, took=9.0, timeout_s=6.0)
    assert isinstance(end, Raise)
    assert asked
    assert client.now <= 6.0 + 1e-9


@pytest.mark.parametrize("name", BASELINES)
def test_a_call_that_inherits_less_time_than_a_pause_doesnt_wait_for_it(name: str) -> None:
    client = Client(name, agent("a0"))
    answer = rejected(503, "Overloaded", executed=False, retry_after_ms=2_000)
    end, _, pauses = client.call(answer, left_s=0.05)
    assert isinstance(end, Raise)
    assert pauses == []


@pytest.mark.parametrize("name", BASELINES)
def test_the_last_attempt_may_use_all_that_is_left_of_a_named_total(name: str) -> None:
    client = Client(name, *agents(4))
    session = client.open(timeout_s=20.0)
    given: list[float] = []
    step = session.next(client.now)
    while not isinstance(step, Raise | Return):
        if isinstance(step, Send):
            given.append(step.timeout_s)
            session.record(RESET, client.now, step)
        else:
            assert isinstance(step, Wait)
            client.now += step.seconds
        step = session.next(client.now)
    assert given[-1] == pytest.approx(20.0 - client.now)
    assert all(each == 5.0 for each in given[:-1]) or name == GRPC


@pytest.mark.parametrize("name", BASELINES)
def test_a_restarted_process_starts_clean(name: str) -> None:
    client = Client(name, agent("a0"))
    assert isinstance(client.algorithm, Baseline)
    client.call(BROKEN)
    rules: Rules[Any] = client.algorithm.rules_of(CAPABILITY)
    (before,) = client.algorithm.index.lookup(CAPABILITY).candidates
    known = rules.of(before, client.now)
    client.put(agent("a0", weight=2.0))
    assert rules.of(client.algorithm.index.lookup(CAPABILITY).candidates[0], client.now) is known
    client.put(agent("a0", incarnation="two"))
    assert rules.of(client.algorithm.index.lookup(CAPABILITY).candidates[0], client.now) is not known


@pytest.mark.parametrize("name", BASELINES)
def test_an_answer_for_an_attempt_that_isnt_under_way_is_a_mistake_of_the_driver(name: str) -> None:
    client = Client(name, agent("a0"))
    session, send = client.send()
    with pytest.raises(RuntimeError):
        session.next(0.0)
    session.record(ok(), 0.1, send)
    with pytest.raises(RuntimeError):
        session.record(ok(), 0.1, send)


# --- round robin ---------------------------------------------------------------------------------------------


def test_round_robin_gives_each_the_same_share() -> None:
    assert set(shares(Client(ROUND_ROBIN, *agents(4)), 40, ok()).values()) == {10}


@pytest.mark.parametrize("answer", [BROKEN, RESET, TIMED_OUT, REFUSED, BUSY, rejected(422), Unreadable("x")])
def test_round_robin_retries_anything_three_times_at_once_on_the_next(answer: Outcome) -> None:
    client = Client(ROUND_ROBIN, *agents(4, idempotent=False))
    end, asked, pauses = client.call(answer)
    assert isinstance(end, Raise)
    assert sorted(asked) == ["a0", "a1", "a2", "a3"]
    assert pauses == []


def test_round_robin_never_shuts_anybody_out() -> None:
    client = Client(ROUND_ROBIN, *agents(2))
    for _ in range(50):
        client.call({"a0": BROKEN, "a1": ok()})
    assert "a0" in {client.call(ok())[1][0] for _ in range(2)}


# --- the naive registry --------------------------------------------------------------------------------------


def test_the_registry_takes_the_least_failed_then_the_least_used() -> None:
    client = Client(REGISTRY, *agents(3))
    assert set(shares(client, 30, ok()).values()) == {10}
    session, send = client.send()
    session.record(BROKEN, 0.0, send)
    failed = send.candidate.agent_id
    assert failed not in shares(client, 20, ok())


def test_the_registry_retries_twice_at_once_elsewhere() -> None:
    end, asked, pauses = Client(REGISTRY, *agents(5)).call(BROKEN)
    assert isinstance(end, Raise)
    assert len(asked) == len(set(asked)) == 3
    assert pauses == []
    assert Client(REGISTRY, agent("a0")).call(BROKEN)[1] == ["a0"] * 3


def test_the_registry_removes_after_five_in_a_row_until_a_new_incarnation() -> None:
    client = Client(REGISTRY, agent("a0"))
    client.call(BROKEN)
    end, asked, _ = client.call(BROKEN)
    assert len(asked) == 2
    assert isinstance(error_of(end), NoHealthyAgent)
    client.now = 1e6
    client.drop("a0")
    client.put(agent("a0"))
    assert client.call(ok())[1] == []
    client.put(agent("a0", incarnation="two"))
    assert isinstance(client.call(ok())[0], Return)


def test_a_success_sets_the_registrys_count_back() -> None:
    client = Client(REGISTRY, agent("a0"))
    for _ in range(4):
        client.call(BROKEN)
        client.call(ok())
    assert isinstance(client.call(ok())[0], Return)


# --- cooldown (LiteLLM) --------------------------------------------------------------------------------------


def test_cooldown_picks_at_random_by_weight() -> None:
    count = shares(Client(LITELLM, agent("a0", weight=3.0), agent("a1")), 2000, ok())
    assert 0.7 < count["a0"] / 2000 < 0.8


def test_a_429_cools_down_for_five_seconds_and_the_retry_goes_elsewhere_at_once() -> None:
    client = Client(LITELLM, *agents(2))
    while True:
        _, asked, pauses = client.call({"a0": BUSY, "a1": ok()})
        if asked[0] == "a0":
            break
    assert asked == ["a0", "a1"]
    assert pauses == []
    began = client.now
    client.now = began + 4.9
    assert "a0" not in shares(client, 50, ok())
    client.now = began + 5.0
    assert "a0" in shares(client, 50, ok())


def answer_of(client: Client, agent_id: str, *answers: Outcome) -> None:
    """Make `agent_id` give these answers, whoever else is asked meanwhile."""
    for answer in answers:
        session, send = client.send()
        for _ in range(1000):
            if send.candidate.agent_id == agent_id:
                break
            session.record(ok(), client.now, send)
            session, send = client.send()
        assert send.candidate.agent_id == agent_id
        session.record(answer, client.now, send)


def flying_to(client: Client, calls: int = 50) -> set[str]:
    """Whom so many calls are sent to, none of which ends."""
    return {client.send()[1].candidate.agent_id for _ in range(calls)}


def test_more_than_half_of_at_least_five_calls_in_a_minute_cool_down() -> None:
    client = Client(LITELLM, *agents(2))
    answer_of(client, "a0", *[BROKEN] * 4)
    client.now = 60.0
    answer_of(client, "a0", ok(), ok(), ok(), ok(), BROKEN, BROKEN, BROKEN, BROKEN)
    assert "a0" in flying_to(client)
    answer_of(client, "a0", BROKEN)
    assert flying_to(client) == {"a1"}


def test_a_retry_after_is_how_long_the_cooldown_lasts() -> None:
    client = Client(LITELLM, *agents(2))
    answer_of(client, "a0", rejected(429, executed=False, retry_after_ms=20_000))
    client.now = 19.9
    assert flying_to(client) == {"a1"}
    client.now = 20.0
    assert flying_to(client) == {"a0", "a1"}


def test_a_lone_deployment_cools_down_when_all_of_a_thousand_calls_failed() -> None:
    client = Client(LITELLM, agent("a0"))
    for _ in range(999):
        answer_of(client, "a0", BROKEN)
    answer_of(client, "a0", BROKEN)
    assert client.call(ok())[1] == []


def test_what_the_caller_did_wrong_neither_cools_down_nor_is_retried() -> None:
    client = Client(LITELLM, *agents(2))
    for _ in range(50):
        assert len(client.call(rejected(422))[1]) == 1
    assert set(shares(client, 50, ok())) == {"a0", "a1"}


def test_all_in_cooldown_fails_at_once() -> None:
    client = Client(LITELLM, *agents(3))
    end, asked, pauses = client.call(BUSY)
    assert isinstance(end, Raise)
    assert sorted(asked) == ["a0", "a1", "a2"]
    end, asked, pauses = client.call(ok())
    assert isinstance(error_of(end), NoHealthyAgent)
    assert (asked, pauses) == ([], [])


def test_a_lone_deployment_is_spared_and_its_retries_back_off() -> None:
    client = Client(LITELLM, agent("a0"))
    _, asked, pauses = client.call(BROKEN)
    assert len(asked) == 3
    assert 0.5 <= pauses[0] <= 1.25
    assert 1.0 <= pauses[1] <= 1.75
    for _ in range(10):
        client.call(BUSY)
    assert isinstance(client.call(ok())[0], Return)
    _, _, pauses = client.call(rejected(429, executed=False, retry_after_ms=3_000))
    assert all(3.0 <= pause <= 3.75 for pause in pauses)


def test_allowed_fails_counts_instead() -> None:
    def make(rng: random.Random, zone: str | None) -> Cooldown:
        return Cooldown(rng, zone, allowed_fails=2)

    client = Client(Baseline(make, random.Random(1)), agent("a0"))
    for _ in range(10):
        client.call(ok())
    assert len(client.call(BROKEN)[1]) == 3
    assert client.call(ok())[1] == []


# --- outlier ejection (gRPC) ---------------------------------------------------------------------------------


def load(client: Client, bad: Iterable[str], calls: int, answer: Outcome = BROKEN) -> Counter[str]:
    """So many calls at once; returns whom they reached."""
    bad = set(bad)
    reached: Counter[str] = Counter()
    for _ in range(calls):
        _, asked, _ = client.call(lambda agent_id: answer if agent_id in bad else ok())
        reached.update(asked)
    return reached


def test_grpc_ejects_by_failure_percentage_in_the_sweep_for_30_s_and_longer_each_time() -> None:
    client = Client(GRPC, *agents(5))
    load(client, ["a0"], 5 * 50)
    assert load(client, ["a0"], 10)["a0"] == 2
    client.now = 10.0
    assert load(client, [], 20)["a0"] == 0
    client.now = 39.9
    assert load(client, [], 20)["a0"] == 0
    client.now = 40.0
    assert load(client, ["a0"], 5 * 50)["a0"] == 50
    client.now = 50.0
    assert load(client, [], 20)["a0"] == 0
    client.now = 109.9
    assert load(client, [], 20)["a0"] == 0
    client.now = 110.0
    assert load(client, [], 20)["a0"] == 4


@pytest.mark.parametrize(
    ("hosts", "calls", "ejected"), [(4, 60, 0), (5, 49, 0), (5, 50, 1), (10, 50, 2), (11, 50, 2)]
)
def test_grpc_needs_five_hosts_and_fifty_calls_and_ejects_while_not_over_ten_percent(
    hosts: int, calls: int, ejected: int
) -> None:
    client = Client(GRPC, *agents(hosts))
    load(client, ["a0", "a1", "a2"], hosts * calls)
    client.now = 10.0
    assert hosts - len(load(client, [], 3 * hosts)) == ejected


def test_grpc_spares_what_fails_85_percent_and_starts_each_interval_anew() -> None:
    client = Client(GRPC, *agents(5))
    answer_of(client, "a0", *[BROKEN] * 85, *[ok()] * 15)
    client.now = 10.0
    assert "a0" in flying_to(client)
    answer_of(client, "a0", *[BROKEN] * 49)
    late = [client.send() for _ in range(5)]
    client.now = 20.5
    for session, send in late:
        session.record(BROKEN, client.now, send)
    assert "a0" in flying_to(client)


def test_grpc_forgets_an_ejection_for_each_sweep_in_service() -> None:
    client = Client(GRPC, *agents(5))
    for ejected, back in [(10.0, 40.0), (50.0, 110.0)]:
        load(client, ["a0"], 5 * 50)
        client.now = ejected
        assert "a0" not in flying_to(client)
        client.now = back
        assert "a0" in flying_to(client)
    # The sweep at 110 put it back; the one at 120 finds it in service: 2 - 1, and the next ejection makes it 2.
    client.now = 120.0
    load(client, ["a0"], 5 * 50)
    client.now = 130.0
    assert "a0" not in flying_to(client)
    client.now = 189.0
    assert "a0" not in flying_to(client)
    client.now = 190.0
    assert "a0" in flying_to(client)


def test_grpc_ejects_by_success_rate_what_lies_far_below_the_mean() -> None:
    client = Client(GRPC, *agents(11))
    turn = 0

    def half(agent_id: str) -> Outcome:
        nonlocal turn
        turn += agent_id == "a0"
        return BROKEN if agent_id == "a0" and turn % 2 else ok()

    for _ in range(11 * 100):
        client.call(half)
    client.now = 10.0
    assert "a0" not in load(client, [], 40)


def test_grpc_retries_by_status_and_not_by_idempotence() -> None:
    cases: list[tuple[Outcome, int]] = [(RESET, 4), (rejected(503), 4), (BUSY, 4), (TIMED_OUT, 1), (BROKEN, 1)]
    for answer, attempts in cases:
        assert len(Client(GRPC, *agents(6, idempotent=False)).call(answer)[1]) == attempts, answer


def test_grpc_pauses_grow_from_a_tenth_and_a_pushback_is_kept_exactly() -> None:
    _, _, pauses = Client(GRPC, *agents(6)).call(RESET)
    assert all(0.8 * base <= pause <= 1.2 * base for pause, base in zip(pauses, [0.1, 0.2, 0.4], strict=True))
    pushback = rejected(503, executed=False, retry_after_ms=700)
    assert Client(GRPC, *agents(6)).call(pushback)[2] == pytest.approx([0.7, 0.7, 0.7])
    answers: Iterator[Outcome] = iter((RESET, pushback, RESET, RESET))
    _, _, pauses = Client(GRPC, *agents(6)).call(lambda _: next(answers))
    assert pauses[1] == pytest.approx(0.7)
    assert 0.08 <= pauses[2] <= 0.12


def test_grpc_stops_retrying_at_half_of_its_tokens() -> None:
    client = Client(GRPC, *agents(6))
    assert len(client.call(RESET)[1]) == 4
    assert len(client.call(RESET)[1]) == 1
    for _ in range(100):
        client.call(ok())
    assert len(client.call(RESET)[1]) == 4


def test_grpc_repeats_at_once_what_nobody_saw_and_skips_what_it_cannot_connect_to() -> None:
    client = Client(GRPC, *agents(6))
    refusing: dict[str, Outcome] = {f"a{i}": REFUSED if i else ok() for i in range(6)}
    for _ in range(3):
        end, _, pauses = client.call(refusing)
        assert isinstance(end, Return)
        assert pauses == []
    assert set(shares(client, 20, ok())) == {"a0"}
    client.now = 1.2
    assert len(shares(client, 20, ok())) == 6
    draining = rejected(503, "NotStarted", executed=False, state="draining")
    _, asked, pauses = Client(GRPC, *agents(6)).call(draining)
    assert (len(asked), len(pauses)) == (5, 3)


def test_grpc_waits_longer_after_each_refused_connection() -> None:
    client = Client(GRPC, *agents(2))
    for since, least, most in [(0.0, 0.8, 1.2), (2.0, 1.28, 1.92), (6.0, 2.0, 3.1)]:
        client.now = since
        answer_of(client, "a0", REFUSED)
        client.now = since + least - 0.01
        assert flying_to(client) == {"a1"}
        client.now = since + most
        assert "a0" in flying_to(client)


def test_grpc_with_nobody_in_service_fails_after_its_pauses() -> None:
    client = Client(GRPC, *agents(2))
    end, asked, pauses = client.call(REFUSED)
    assert isinstance(error_of(end), NoHealthyAgent)
    assert sorted(asked) == ["a0", "a1"]
    assert len(pauses) == 3


# --- P2C with peak EWMA (Finagle, Linkerd) -------------------------------------------------------------------


def timed(client: Client, took: Callable[[str], float], calls: int) -> Counter[str]:
    """Calls one after another, each of which takes as long as `took` says."""
    reached: Counter[str] = Counter()
    for _ in range(calls):
        session, send = client.send()
        reached[send.candidate.agent_id] += 1
        client.now += took(send.candidate.agent_id)
        session.record(ok(), client.now, send)
    return reached


def test_the_faster_of_two_wins_and_a_slow_one_is_tried_again_when_its_peak_has_faded() -> None:
    client = Client(FINAGLE, *agents(2))
    reached = timed(client, lambda agent_id: 1.0 if agent_id == "a0" else 0.01, 100)
    assert reached["a0"] <= 2
    assert reached["a1"] >= 98
    client.now += 60.0
    session, send = client.send()
    session.record(ok(), client.now + 0.1, send)
    client.now += 0.1
    assert client.send()[1].candidate.agent_id != send.candidate.agent_id


def test_calls_in_flight_weigh_and_an_unmeasured_one_gets_no_second_call() -> None:
    client = Client(FINAGLE, *agents(2))
    first = client.send()[1].candidate.agent_id
    assert client.send()[1].candidate.agent_id != first
    assert client.send()[1].candidate.agent_id in {"a0", "a1"}
    client = Client(FINAGLE, *agents(2))
    client.send()
    session, send = client.send()
    session.record(ok(), 1.0, send)
    client.now = 1.0
    # The other is unmeasured, and has a call in flight.
    assert client.send()[1].candidate.agent_id == send.candidate.agent_id
    client = Client(FINAGLE, *agents(2))
    timed(client, lambda _: 0.1, 20)
    flying = Counter(client.send()[1].candidate.agent_id for _ in range(40))
    assert abs(flying["a0"] - flying["a1"]) <= 4


@pytest.mark.parametrize(
    ("answer", "avoided_s", "back_s"),
    [
        (BROKEN, 35.0, 45.0),
        (REFUSED, 35.0, 45.0),
        (rejected(429, executed=False, retry_after_ms=60_000), 60.0, 70.0),
    ],
)
def test_a_fast_failure_looks_slow_and_a_retry_after_slower_still(
    answer: Outcome, avoided_s: float, back_s: float
) -> None:
    client = Client(FINAGLE, *agents(3))
    timed(client, lambda _: 0.1, 50)
    session, send = client.send()
    client.now += 0.001
    session.record(answer, client.now, send)
    failed = send.candidate.agent_id
    # 5 s fade to 0.1 s in 10 s x ln 50 = 39 s, 60 s in 64 s.
    assert failed not in timed(client, lambda _: 0.1, int(avoided_s / 0.1))
    assert failed in timed(client, lambda _: 0.1, int((back_s - avoided_s) / 0.1))


def test_finagle_closes_after_five_in_a_row_probes_once_and_fails_open() -> None:
    client = Client(FINAGLE, agent("a0", idempotent=False), agent("a1", idempotent=False))
    # Both fail, so both are closed: calls go on being sent.
    for _ in range(40):
        assert len(client.call(BROKEN)[1]) == 1
    accrual = Accrual(0.0)
    rng = random.Random(1)
    for _ in range(4):
        accrual.failed(1.0, rng)
    assert accrual.open(1.0)
    accrual.failed(1.0, rng)
    assert not accrual.open(5.9)
    assert accrual.open(6.0)
    accrual.sent(6.0)
    assert not accrual.open(6.0)
    accrual.failed(6.0, rng)
    assert not accrual.open(10.9)
    assert accrual.open(16.0)
    accrual.sent(16.0)
    accrual.ignored()
    assert accrual.open(16.0)
    accrual.sent(16.0)
    accrual.succeeded(16.0)
    assert accrual.open(16.0)
    # Revived: all of it begins anew, the dead times too.
    for _ in range(4):
        accrual.failed(16.0, rng)
    assert accrual.open(16.0)
    accrual.failed(16.0, rng)
    assert accrual.open(21.0)


def test_finagle_keeps_it_closed_for_5_then_5_to_10_then_10_to_20_up_to_300_s() -> None:
    accrual, rng, now = Accrual(0.0), random.Random(1), 0.0
    for _ in range(4):
        accrual.failed(now, rng)
    for least, most in [(5, 5), (5, 10), (10, 20), (20, 40), (40, 80), (80, 160), (160, 300), (300, 300)]:
        accrual.sent(now)
        accrual.failed(now, rng)
        assert not accrual.open(now + least - 0.1)
        assert accrual.open(now + most)
        now += most


def test_finagle_closes_below_80_percent_only_after_30_s_and_with_five_requests() -> None:
    def closed_at(spacing_s: float) -> float | None:
        accrual, rng = Accrual(0.0), random.Random(1)
        for number in range(100):
            now = number * spacing_s
            if number % 2:
                accrual.failed(now, rng)
            else:
                accrual.succeeded(now)
            if not accrual.open(now):
                return now
        return None

    assert closed_at(1.0) == 31.0
    assert closed_at(20.0) is None


def test_finagle_sends_away_from_the_closed_one() -> None:
    client = Client(FINAGLE, *agents(3))
    held = [client.send() for _ in range(60)]
    for session, send in held:
        session.record(BROKEN if send.candidate.agent_id == "a0" else ok(), 0.0, send)
    assert "a0" not in {client.send()[1].candidate.agent_id for _ in range(100)}


def test_finagle_repeats_what_ran_only_if_it_is_idempotent_and_within_its_budget() -> None:
    never_run = rejected(503, executed=False)
    cases: list[tuple[Outcome, bool, int]] = [
        (BROKEN, True, 3),
        (TIMED_OUT, True, 3),
        (BROKEN, False, 1),
        (TIMED_OUT, False, 1),
        (REFUSED, False, 3),
        (never_run, False, 3),
        (rejected(422), True, 1),
    ]
    for answer, idempotent, attempts in cases:
        client = Client(FINAGLE, *agents(4, idempotent=idempotent))
        _, asked, pauses = client.call(answer)
        assert len(asked) == attempts, (answer, idempotent)
        assert pauses == []
    client = Client(FINAGLE, *agents(4))
    attempts = sum(len(client.call(BROKEN)[1]) for _ in range(1000))
    # 100 in reserve, and a fifth of the calls.
    assert attempts == 1000 + 100 + 200


def test_the_budget_forgets_after_ten_seconds() -> None:
    budget = RetryBudget()
    for _ in range(100):
        assert budget.withdraw(0.0)
    assert not budget.withdraw(9.9)
    assert budget.withdraw(10.0)
    total = WindowedSum(10.0, 10)
    total.add(1.0, 0.5)
    total.add(2.0, 5.0)
    assert [total.value(now) for now in (9.9, 10.0, 14.9, 15.0, 1e9)] == [3.0, 2.0, 2.0, 0.0, 0.0]


# --- additive score ------------------------------------------------------------------------------------------


def test_the_highest_sum_wins_and_ties_are_drawn() -> None:
    client = Client(ADDITIVE, *agents(3))
    assert set(shares(client, 60, ok())) == {"a0", "a1", "a2"}
    client.put(agent("a1", weight=2.0))
    assert set(shares(client, 60, ok())) == {"a1"}


def test_the_near_zone_counts_twice_the_region() -> None:
    client = Client(
        ADDITIVE, agent("far", zone="us/a"), agent("region", zone="eu/b"), agent("near", zone="eu/a"), zone="eu/a"
    )
    assert set(shares(client, 20, ok())) == {"near"}
    client.drop("near")
    assert set(shares(client, 20, ok())) == {"region"}


def test_health_is_the_share_of_the_last_twenty() -> None:
    client = Client(ADDITIVE, agent("a0", weight=4.0), agent("a1"))
    # .1 x 3/4 of weight is worth 3 failures of 20 (.4 x 3/20 = .06), not 4 (.08).
    for number in range(20):
        session, send = client.send()
        assert send.candidate.agent_id == "a0"
        session.record(ok() if number < 17 else BROKEN, 0.0, send)
    session, send = client.send()
    session.record(BROKEN, 0.0, send)
    assert send.candidate.agent_id == "a0"
    assert client.send()[1].candidate.agent_id == "a1"
    client = Client(ADDITIVE, agent("a0"))
    answer_of(client, "a0", *[BROKEN] * 30, *[ok()] * 20)
    assert isinstance(client.algorithm, Baseline)
    (candidate,) = client.algorithm.index.lookup(CAPABILITY).candidates
    assert client.algorithm.rules_of(CAPABILITY).of(candidate, 0.0).health == 1.0


def test_load_is_its_own_in_flight_or_the_last_report() -> None:
    client = Client(ADDITIVE, *agents(2, max_concurrency=10))
    flying = Counter(client.send()[1].candidate.agent_id for _ in range(10))
    assert set(flying.values()) == {5}
    client = Client(ADDITIVE, *agents(2, max_concurrency=10))
    session, send = client.send()
    session.record(ok(load=LoadReport(in_flight=3, queued=1, max_concurrency=10)), 0.0, send)
    other = {client.send()[1].candidate.agent_id for _ in range(4)}
    assert other == {"a0", "a1"} - {send.candidate.agent_id}


def test_additive_tries_three_with_doubling_pauses() -> None:
    end, asked, pauses = Client(ADDITIVE, *agents(5)).call(BROKEN)
    assert isinstance(end, Raise)
    assert len(set(asked)) == 3
    assert pauses == pytest.approx([0.2, 0.4])
    assert len(Client(ADDITIVE, *agents(5)).call(rejected(422))[1]) == 1


def test_a_passed_deadline_is_said_so() -> None:
    session = Client(ADDITIVE, agent("a0")).open(timeout_s=1.0)
    assert isinstance(error_of(session.next(1.0)), DeadlineExceeded)
