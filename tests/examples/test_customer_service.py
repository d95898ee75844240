"""The customer service example: its handlers as functions, its agents together, and its verdict."""

from __future__ import annotations

from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

import pytest

from agent_reach import MemoryRegistry, ReachClient
from examples.customer_service import data
from examples.customer_service.agents import intent, knowledge, profiles, tickets
from examples.customer_service.agents.__main__ import NAMES, handler
from examples.customer_service.agents.summary import Summariser
from examples.customer_service.demo import report
from examples.customer_service.tally import Ended, Facts, Killed, Outage, Tally, problems
from examples.customer_service.text import Vectoriser, cosine, mean, words
from examples.customer_service.traffic import CAPABILITIES, Traffic

# --- handlers as plain functions -----------------------------------------------------------------------------


async def test_intent_of_most_messages_is_recognised() -> None:
    messages = data.messages()
    right = [message for message in messages if (await intent.detect(message.text)).name == message.intent]
    assert len(right) >= 0.8 * len(messages)


async def test_a_message_without_a_known_word_is_given_no_confidence() -> None:
    assert (await intent.detect("qwertz")).confidence == 0.0


@pytest.mark.parametrize(
    ("question", "title"),
    [
        ("My PIN is blocked", "Blocked PIN"),
        ("what are the limits for a top-up?", "Top-up limits"),
        ("How do I close my account?", "Close your account"),
    ],
)
def test_the_fitting_article_comes_first(question: str, title: str) -> None:
    found = knowledge.retrieve(question, limit=2)
    assert found[0].title == title
    assert len(found) <= 2


def test_no_article_is_offered_for_a_question_about_something_else() -> None:
    assert knowledge.retrieve("qwertz") == []


async def test_a_stolen_card_is_urgent_and_goes_to_fraud() -> None:
    ticket = await tickets.TicketDesk(write_s=0).open("C001", "My card was stolen!")
    assert (ticket.queue, ticket.urgency) == ("fraud", "urgent")


async def test_two_desks_never_give_the_same_ticket_number() -> None:
    desks = [tickets.TicketDesk(write_s=0), tickets.TicketDesk(write_s=0)]
    numbers = [(await desk.open("C001", "hello")).number for desk in desks for _ in range(3)]
    assert len(set(numbers)) == 6


async def test_a_profile_is_found_by_number_and_an_unknown_number_gives_none() -> None:
    found = await profiles.read("C001")
    assert found is not None
    assert found.customer_id == "C001"
    assert await profiles.read("C999") is None


def test_text_near_to_itself_and_far_from_others() -> None:
    vectoriser = Vectoriser(["activate my card", "close the account"])
    card, account = vectoriser.vector("Activating cards"), vectoriser.vector("closing accounts")
    assert cosine(card, card) == pytest.approx(1.0)
    assert cosine(card, account) == 0.0
    assert cosine(card, mean([card, account])) == pytest.approx(0.5**0.5)
    assert words("The cards aren't there") == ["card", "arent"]


# --- all agents together, without sockets --------------------------------------------------------------------


async def test_five_agents_in_one_process_find_and_call_each_other() -> None:
    registry = MemoryRegistry()
    tally = Tally()
    async with AsyncExitStack() as agents:
        for name in NAMES:
            served = handler(name)
            client = ReachClient(f"{name}-1", handlers=[served], registry=registry)
            if isinstance(served, Summariser):
                served.reach = client
            await agents.enter_async_context(client)
        reach = await agents.enter_async_context(ReachClient("caller", registry=registry))
        for capability in CAPABILITIES.values():
            await reach.wait_for(capability, timeout=5.0)

        summary = await reach.call(
            CAPABILITIES["summary"],
            {"customer_id": "C001", "messages": ["Hello", "I forgot my passcode, how do I get a new one?"]},
        )
        assert summary.data["customer"].startswith("Ada Moreau")
        assert summary.data["gist"].startswith("I forgot")
        assert "Forgotten passcode" in summary.data["articles"]
        unknown = await reach.call(CAPABILITIES["summary"], {"customer_id": "C999", "messages": ["Hello"]})
        assert unknown.data["customer"] == "unknown customer C999"

        traffic = Traffic(reach, tally, rate=50.0)
        for name in NAMES:
            traffic.start_call(name)
        await traffic.finish()
    assert {call.capability for call in tally.of(outcome="ok")} == set(CAPABILITIES.values())
    assert tally.started == len(tally.calls) == len(NAMES)


# --- the verdict ---------------------------------------------------------------------------------------------


def ended(**changes: Any) -> Ended:
    call = Ended(
        capability="ticket.open.v1",
        outcome="ok",
        started_at=1.0,
        ended_at=1.1,
        agent_id="tickets-2",
        url="http://b",
    )
    return replace(call, **changes)


LOST_TO_THE_KILL = ended(outcome="unknown", started_at=9.9, ended_at=10.01, agent_id="tickets-1", url="http://a")


def good_run() -> tuple[Tally, Facts]:
    """A run in which everything was put to the test and nothing was lost."""
    tally = Tally()
    tally.calls = [
        ended(),
        LOST_TO_THE_KILL,
        ended(started_at=25.0, ended_at=25.1),
        ended(agent_id="tickets-3", url="http://c", started_at=45.0, ended_at=45.1),
    ]
    tally.started = len(tally.calls)
    return tally, Facts(Killed("tickets-1", 10.0), Outage(20.0, 40.0), [("tickets-3", "http://c")])


def test_a_run_that_lost_nothing_is_good(capsys: pytest.CaptureFixture[str]) -> None:
    tally, facts = good_run()
    assert problems(tally, facts) == []
    assert report(tally, facts) == 0
    assert "nothing was lost" in capsys.readouterr().out


def test_one_failed_call_fails_the_run_and_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    tally, facts = good_run()
    tally.calls.append(ended(outcome="failed", error="NoHealthyAgent: all are shut out"))
    tally.started += 1
    assert report(tally, facts) == 1
    assert "ticket.open.v1 failed: NoHealthyAgent: all are shut out" in capsys.readouterr().out


def test_no_more_than_ten_problems_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    tally, facts = good_run()
    tally.calls += [ended(outcome="failed", error=f"error {number}") for number in range(12)]
    tally.started += 12
    assert report(tally, facts) == 1
    shown = capsys.readouterr().out
    assert "12 problems" in shown
    assert "error 9" in shown
    assert "error 10" not in shown


@pytest.mark.parametrize(
    "call",
    [
        replace(LOST_TO_THE_KILL, agent_id="tickets-2"),
        replace(LOST_TO_THE_KILL, started_at=30.0, ended_at=30.1),
        replace(LOST_TO_THE_KILL, started_at=5.0, ended_at=9.0),
    ],
    ids=["on another agent", "long after the kill", "before the kill"],
)
def test_an_unknown_outcome_is_excused_by_the_kill_only(call: Ended) -> None:
    tally, facts = good_run()
    tally.calls.append(call)
    tally.started += 1
    assert ["though not for the kill" in problem for problem in problems(tally, facts)] == [True]


def test_a_call_that_never_ended_fails_the_run() -> None:
    tally, facts = good_run()
    tally.started += 2
    assert problems(tally, facts) == ["2 calls never ended"]


def vacuous_runs() -> list[tuple[str, Tally, Facts]]:
    nothing_in_flight, no_outage, no_calls_then, unused, nobody_new = (good_run() for _ in range(5))
    nothing_in_flight[0].calls.remove(LOST_TO_THE_KILL)
    nothing_in_flight[0].started -= 1
    no_outage[1].outage = None
    no_calls_then[1].outage = Outage(30.0, 40.0)
    unused[1].newcomers.append(("intent-1", "http://d"))
    nobody_new[1].newcomers.clear()
    return [
        ("in flight on a killed agent", *nothing_in_flight),
        ("while etcd was away", *no_outage),
        ("while etcd was away", *no_calls_then),
        ("intent-1 at http://d answered no call", *unused),
        ("no agent was replaced", *nobody_new),
    ]


@pytest.mark.parametrize(("reason", "tally", "facts"), vacuous_runs())
def test_a_run_that_put_nothing_to_the_test_is_no_success(reason: str, tally: Tally, facts: Facts) -> None:
    [problem] = problems(tally, facts)
    assert problem.startswith("proves nothing")
    assert reason in problem


def test_the_table_counts_by_capability_and_in_all() -> None:
    tally, _ = good_run()
    tally.calls.append(ended(capability="intent.detect.v1", agent_id="intent-1", attempts=2, ended_at=1.2))
    rows = {row[0]: row[1:] for row in tally.rows()}
    assert rows["intent.detect.v1"] == ("1", "1", "0", "0", "1", "200", "200", "1")
    assert rows["ticket.open.v1"] == ("4", "3", "0", "1", "0", "100", "100", "2")
    assert rows["all"][0] == "5"
