"""Agents that come, leave and die, and how clients hear of it."""

from __future__ import annotations

import pytest

from agent_reach.routing.index import Remove, Reset, Upsert
from agent_reach.routing.outcomes import LostAnswer, Outcome, Rejected, Succeeded, Unsent
from agent_reach.testing.simulation import Constant, Poisson, Simulation
from tests.simulation.engine.support import CAPABILITY, OneShot, Small, agent_reach, assert_nothing_left


def test_a_killed_server_loses_what_it_holds_and_refuses_what_comes() -> None:
    small = Small(slots=1)
    small.call(1.0)
    small.call(1.0)
    small.sim.kill(small.server, 1.05)
    small.call(2.0)
    metrics = small.run()
    assert small.algorithm.ended == [
        (pytest.approx(1.0505), LostAnswer("connection reset")),
        (pytest.approx(1.0505), LostAnswer("connection reset")),
        (pytest.approx(2.001), Unsent("connect", "Connection refused")),
    ]
    assert metrics.counts().executions == 1, "the queued one never ran"
    assert metrics.dead_attempts == [(2.0, "client-1", "kb-1")]
    assert_nothing_left(small.sim)


def test_a_lost_host_tells_nobody() -> None:
    small = Small()
    small.call(1.0)
    small.sim.kill(small.server, 1.05, silent=True)
    small.call(4.0)
    metrics = small.run()
    first, second = small.algorithm.ended
    assert first == (pytest.approx(3.0), LostAnswer("no answer in time", timed_out=True))
    assert isinstance(second[1], Unsent)
    assert (second[0], second[1].timed_out) == (pytest.approx(5.0), True)
    assert len(metrics.dead_attempts) == 1


def test_the_entry_of_a_dead_server_goes_when_its_lease_is_over() -> None:
    small = Small()
    small.sim.kill(small.server, 3.0)
    small.run()
    (_, (at, change)) = small.algorithm.news
    assert change == Remove("kb-1", 2)
    assert 18.005 <= at <= 18.05


def test_a_server_that_starts_again_is_another_incarnation_and_outlives_its_old_lease() -> None:
    small = Small()
    small.sim.restart(small.server, 3.0, down_s=2.0)
    small.call(4.0)
    small.call(40.0)
    small.run()
    changes = [change for _, change in small.algorithm.news]
    assert isinstance(changes[0], Reset)
    assert isinstance(changes[1], Upsert)
    assert len(changes) == 2
    assert (changes[0].infos[0].incarnation, changes[1].info.incarnation) == ("1", "2")
    assert [type(outcome) for outcome in small.algorithm.outcomes] == [Unsent, Succeeded]


def test_a_server_that_drains_says_so_serves_what_still_comes_and_then_closes() -> None:
    small = Small()
    small.sim.drain(small.server, 1.05)
    for at_s in (1.0, 1.0505, 2.0):
        small.call(at_s)
    small.run()
    # Withdrawn at once: by 2.0 the client knows nobody any more.
    assert small.errors == [None, None, "AgentNotFound"]
    states = [o.reply.state for o in small.algorithm.outcomes if isinstance(o, Succeeded)]
    assert states == ["draining", "draining"]
    assert small.server.state == "down"
    removed_at = small.algorithm.news[1][0]
    assert 1.055 <= removed_at <= 1.1


def drained(at_s: float) -> tuple[Small, list[tuple[float, Outcome]]]:
    """A client that doesn't hear of the drain at 1 s, with work of 10 s under way, and another call at `at_s`."""
    small = Small(service=Constant(10.0), timeout=60.0)
    small.algorithm.timeout_s = 50.0
    small.client.watch_delay_s = 1000.0
    small.call(0.5)
    small.sim.drain(small.server, 1.0)
    small.call(at_s)
    small.run(2000.0)
    return small, list(small.algorithm.ended)


def test_after_its_linger_a_draining_server_refuses_new_work_and_finishes_the_old() -> None:
    small, ended = drained(5.0)
    (refused_at, refused), (done_at, done) = ended
    assert isinstance(refused, Rejected)
    assert (refused.status, refused.error.executed, refused.state) == (503, False, "draining")
    assert refused_at == pytest.approx(5.001)
    assert isinstance(done, Succeeded)
    assert done_at == pytest.approx(10.501)
    assert_nothing_left(small.sim)


def test_a_drained_server_is_closed_as_soon_as_it_is_idle() -> None:
    _, ended = drained(11.0)
    at, outcome = ended[1]
    assert outcome == Unsent("connect", "Connection refused")
    assert at == pytest.approx(11.001)


def test_a_drain_ends_after_its_time_whatever_runs() -> None:
    small = Small(service=Constant(1000.0), timeout=2000.0, slots=1)
    small.algorithm.timeout_s = 2000.0
    small.call(0.5)
    small.call(0.5)
    small.sim.drain(small.server, 1.0)
    metrics = small.run(3000.0)
    (at, waited), (_, ran) = small.algorithm.ended
    assert at == pytest.approx(31.0005)
    assert isinstance(waited, Rejected)
    assert isinstance(ran, Rejected)
    assert (waited.status, waited.error.executed, ran.status, ran.error.executed) == (503, False, 503, True)
    assert metrics.counts().executions == 1
    assert_nothing_left(small.sim)


def test_a_server_that_is_up_cannot_be_started() -> None:
    small = Small()
    with pytest.raises(ValueError, match="is up"):
        small.server.start()


def test_a_client_with_a_partial_view_hears_of_no_other_instance() -> None:
    sim = Simulation(1)
    servers = sim.fleet(CAPABILITY, 10, service=Constant(0.01))
    late = sim.fleet(CAPABILITY, 1, service=Constant(0.01), name="late", start_s=5.0)
    (client,) = sim.clients(1, view=lambda info: info.agent_id in ("kb-1", "kb-2"))
    sim.load([client], CAPABILITY, Poisson(20))
    metrics = sim.run(10.0)
    used = [s.agent_id for s in (*servers, *late) if metrics.attempts_to(s.agent_id)]
    assert used == ["kb-1", "kb-2"]


def test_a_share_of_the_instances_is_drawn_for_each_client() -> None:
    sim = Simulation(1)
    sim.fleet(CAPABILITY, 50, service=Constant(0.01))
    clients = sim.clients(20, lambda rng, zone: OneShot(rng, zone), view=0.3)
    views = [frozenset(c.algorithm.router.index.instances) for c in clients if isinstance(c.algorithm, OneShot)]
    assert len(set(views)) == 20
    assert sum(map(len, views)) / (20 * 50) == pytest.approx(0.3, abs=0.05)


def test_news_reach_each_client_after_a_delay_of_its_own() -> None:
    sim = Simulation(1)
    clients = sim.clients(30, lambda rng, zone: OneShot(rng, zone), watch_delay_s=(0.1, 0.2))
    sim.fleet(CAPABILITY, 1, service=Constant(0.01), start_s=1.0)
    sim.run(5.0)
    heard = [c.algorithm.news[1][0] for c in clients if isinstance(c.algorithm, OneShot)]
    assert len(set(heard)) == 30
    assert min(heard) >= 1.1
    assert max(heard) <= 1.2


def test_a_rolling_restart_under_load_loses_nothing_that_agent_reach_can_save() -> None:
    sim = Simulation(2)
    servers = sim.fleet(CAPABILITY, 4, service=Constant(0.05))
    clients = sim.clients(3, agent_reach)
    for turn, server in enumerate(servers):
        sim.drain(server, 5.0 + 5 * turn)
        sim.start(server, 9.0 + 5 * turn)
    sim.load(clients, CAPABILITY, Poisson(50))
    metrics = sim.run(30.0)
    assert metrics.summary().failed == 0
    for turn, server in enumerate(servers):
        back = metrics.first_use_after(server.agent_id, 9.0 + 5 * turn)
        assert back is not None
        assert back < 10.0 + 5 * turn
        assert metrics.attempts_to(server.agent_id, 5.1 + 5 * turn, 9.0 + 5 * turn) == 0
    assert_nothing_left(sim)
