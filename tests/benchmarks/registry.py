"""`make bench-registry`: what the registry costs at scale, in etcd and in its clients, as ratios within one run.

`python -m tests.benchmarks.registry --help` tells the options. Each part starts an etcd of its own, prints a table
and writes its figures to `build/bench-registry/`. The machine may be shared, and clients, writer and etcd share it
too: compare the contenders of one run, not absolute times.

The contender is a design that takes every change for "reload everything"; it exists only here.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from agent_reach.config import RegistryConfig
from agent_reach.registry.etcd import EtcdRegistry
from agent_reach.registry.etcd_client import connect
from agent_reach.registry.keys import key_of
from agent_reach.testing.etcd import EtcdServer
from tests.benchmarks.registry_support import (
    LEASE_S,
    ROOT,
    Children,
    Table,
    children,
    fill,
    open_etcd,
    quantile,
    record,
    size,
)

CONTENDERS = {"watcher": "watch, one change at a time", "reload": "reload everything"}
# The mean time between two refreshes of one client.
REFRESH_S = RegistryConfig().refresh_s + RegistryConfig().refresh_jitter_s / 2
# A client that is later than this doesn't keep up.
KEEPS_UP_S = 2.0
_WRITERS = 4

Figures = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much of everything; the defaults are the full run, about four minutes."""

    cold_instances: tuple[int, ...] = (100, 1_000, 10_000)
    cold_rounds: int = 3
    event_instances: int = 1_000
    event_rate: float = 100.0
    event_s: float = 5.0
    event_rounds: int = 2
    refresh_clients: int = 500
    refresh_instances: int = 5_000
    refresh_processes: int = 4
    refresh_rounds: int = 3
    # Over how long one round of refreshes is spread, and how long one of full lists may take.
    refresh_over_s: float = 4.0
    list_within_s: float = 8.0
    storm_instances: int = 500
    storm_clients: int = 100
    storm_processes: int = 4
    # The pace is that of all of them within a minute; in a shorter storm fewer have their turn.
    storm_rate: float = 500 / 60
    storm_s: float = 15.0
    # How long the last clients may take afterwards.
    storm_patience_s: float = 15.0


QUICK = Sizes(
    cold_instances=(10, 20),
    cold_rounds=1,
    event_instances=20,
    event_s=0.3,
    event_rounds=1,
    refresh_clients=4,
    refresh_instances=50,
    refresh_processes=2,
    refresh_rounds=1,
    refresh_over_s=0.2,
    list_within_s=1.0,
    storm_instances=10,
    storm_clients=4,
    storm_processes=2,
    storm_rate=20.0,
    storm_s=0.5,
    storm_patience_s=10.0,
)


@contextmanager
def fresh_etcd() -> Iterator[tuple[EtcdServer, Path]]:
    """An etcd of one's own, and a folder that goes with it."""
    with tempfile.TemporaryDirectory(prefix="bench-registry-") as folder, EtcdServer(Path(folder) / "data") as etcd:
        yield etcd, Path(folder)


# --- cold start ---------------------------------------------------------------------------------------------


def cold_start(sizes: Sizes) -> tuple[Table, Figures]:
    """From `Watcher.start()` to the first index, and what it keeps in memory, each time in a fresh process."""
    figures: Figures = {}
    with fresh_etcd() as (etcd, folder):
        for count in sizes.cold_instances:
            fill(etcd, f"n{count}", count)
        rounds: dict[int, list[dict[str, float]]] = {count: [] for count in sizes.cold_instances}
        for _ in range(sizes.cold_rounds):
            for count, measured in rounds.items():
                with children(folder, 1) as one:
                    (told,) = one.share("start", 1, kind="watcher", port=etcd.port, namespace=f"n{count}")
                assert told["instances"] == count
                measured.append(told)
    for count, measured in rounds.items():
        figures[str(count)] = {name: statistics.median(one[name] for one in measured) for name in measured[0]}
    rows = [
        (
            f"{count:,} instances",
            f"{f['took_s'] * 1e3:,.0f} ms",
            f"{f['took_s'] / count * 1e6:,.0f} us",
            f"{f['pause_s'] * 1e3:,.0f} ms",
            size(f["memory"]),
            size(f["memory"] / count),
            size(f["peak"]),
        )
        for count in sizes.cold_instances
        for f in [figures[str(count)]]
    ]
    bytes_each = len(record("n", 1).to_bytes())
    return (
        Table(
            "Cold start: from Watcher.start() to the first usable index",
            ("", "time", "per instance", "loop held up", "memory kept", "per instance", "memory at peak"),
            rows,
            (
                f"Records of {bytes_each:,} bytes; medians of {sizes.cold_rounds} fresh processes after imports.",
                "Loop held up: the longest that a timer on the application's event loop came late meanwhile.",
                "Memory: growth of the process's resident set, watch and its threads included.",
            ),
        ),
        figures,
    )


# --- from the event to the route ------------------------------------------------------------------------------


def event_to_routable(sizes: Sizes) -> tuple[Table, Figures]:
    """From just before a put until the index of another process shows it."""
    latencies: dict[str, list[float]] = {kind: [] for kind in CONTENDERS}
    totals: dict[str, dict[str, float]] = {kind: {} for kind in CONTENDERS}
    with fresh_etcd() as (etcd, folder), children(folder, 1) as watching, children(folder, 1) as reloading:
        # A namespace each: nobody is woken by the other's changes.
        ones = {"watcher": watching, "reload": reloading}
        leases = {kind: fill(etcd, kind, sizes.event_instances) for kind in ones}
        for kind, one in ones.items():
            one.share("start", 1, kind=kind, port=etcd.port, namespace=kind)
        for _ in range(sizes.event_rounds):
            for kind, one in ones.items():
                before, etcd_before = one.total(), etcd.cpu_s()
                put_at = _change(
                    etcd, kind, leases[kind], rate=sizes.event_rate, for_s=sizes.event_s, stop=threading.Event()
                )
                seen = _wait_seen(one, set(put_at), clients=1, patience_s=10.0)
                gave_up_at = time.monotonic()
                after = one.total()
                used = {name: after[name] - before[name] for name in after}
                used |= {"etcd_cpu_s": etcd.cpu_s() - etcd_before, "changes": len(put_at)}
                used["missed"] = len(put_at) - len(seen)
                totals[kind] = {name: totals[kind].get(name, 0) + value for name, value in used.items()}
                # Of what was never seen it is only known that it took longer than we waited.
                latencies[kind] += (seen[i][1] - at if i in seen else gave_up_at - at for i, at in put_at.items())
    figures: Figures = {}
    for kind, total in totals.items():
        changes = total["changes"]
        figures[kind] = {
            "changes": changes,
            "p50_ms": quantile(latencies[kind], 0.5) * 1e3,
            "p99_ms": quantile(latencies[kind], 0.99) * 1e3,
            "worst_ms": max(latencies[kind]) * 1e3,
            "client_cpu_ms": total["cpu_s"] / changes * 1e3,
            "etcd_cpu_ms": total["etcd_cpu_s"] / changes * 1e3,
            "received": total["received"] / changes,
            "lists": total["lists"],
            "missed": total["missed"],
        }
    columns = {
        "p50": ("p50_ms", "{:,.1f} ms"),
        "p99": ("p99_ms", "{:,.1f} ms"),
        "worst": ("worst_ms", "{:,.1f} ms"),
        "client CPU/change": ("client_cpu_ms", "{:,.2f} ms"),
        "etcd CPU/change": ("etcd_cpu_ms", "{:,.2f} ms"),
        "received/change": ("received", None),
        "full lists": ("lists", "{:,.0f}"),
        "missed": ("missed", "{:,.0f}"),
    }
    return (
        Table(
            f"From event to route: {sizes.event_rate:g} changes/s among {sizes.event_instances:,} instances",
            ("", *columns),
            _contenders(figures, columns),
            (
                f"{figures['watcher']['changes']:,.0f} changes each, in {sizes.event_rounds} rounds by turns; "
                "one client; from before the put to the index of another process.",
                "The reloads are coalesced: one for all changes that came while the last one ran.",
                "etcd CPU includes the put itself. Missed: not there 10 s after the last change.",
            ),
        ),
        figures,
    )


def _change(
    etcd: EtcdServer, namespace: str, leases: dict[str, int], *, rate: float, for_s: float, stop: threading.Event
) -> dict[str, float]:
    """Write records anew at an even pace, until `stop`; when each new incarnation was written (monotonic)."""
    client = connect(f"127.0.0.1:{etcd.port}", timeout_s=10.0, tls=None)
    put_at: dict[str, float] = {}
    began = time.monotonic()
    for number in range(max(1, round(rate * for_s))):
        info = record(namespace, number % len(leases), uuid.uuid4().hex)
        body, key = info.to_bytes(), key_of(namespace, info.agent_id)
        if stop.wait(max(0.0, began + number / rate - time.monotonic())):
            break
        put_at[info.incarnation] = time.monotonic()
        client.put(key, body, lease=leases[info.agent_id])
    client.close()
    return put_at


def _wait_seen(
    ones: Children, incarnations: set[str], *, clients: int, patience_s: float
) -> dict[str, list[float]]:
    """Wait until each of so many clients has seen all of them; who saw what, and when the last one did."""
    deadline = time.monotonic() + patience_s
    while True:
        seen: dict[str, list[float]] = {}
        for told in ones.ask("saw"):
            for incarnation in told.keys() & incarnations:
                count, last = seen.get(incarnation, (0, 0.0))
                seen[incarnation] = [count + told[incarnation][0], max(last, told[incarnation][1])]
        if time.monotonic() > deadline or all(seen.get(i, (0,))[0] == clients for i in incarnations):
            return seen
        time.sleep(0.2)


# --- the cost of a refresh ------------------------------------------------------------------------------------


def refresh_cost(sizes: Sizes) -> tuple[Table, Figures]:
    """Prove that nothing changed: by a probe and the watch's progress, against a list of everything."""
    namespace, clients = "refresh", sizes.refresh_clients
    figures: Figures = {}
    with fresh_etcd() as (etcd, folder), children(folder, sizes.refresh_processes) as ones:
        leases = fill(etcd, namespace, sizes.refresh_instances)
        ones.share("open_watches", clients, port=etcd.port, namespace=namespace)
        for name, rate in (("nothing changes", 0.0), ("1 change/s", 1.0)):
            with _changing(etcd, namespace, leases, rate):
                figures[name] = _refreshes(etcd, ones, sizes)
    columns = {
        "sent": ("sent", None),
        "received": ("received", None),
        "etcd CPU": ("etcd_cpu_ms", "{:,.2f} ms"),
        "client CPU": ("client_cpu_ms", "{:,.2f} ms"),
        "raft entries": ("raft_entries", "{:,.2f}"),
        "p50": ("p50_ms", "{:,.1f} ms"),
        "measured": ("refreshes", "{:,.0f}"),
        "proved": ("good", "{:,.0f}"),
    }
    rows, notes = [], []
    for name, told in figures.items():
        for way in ("probe + progress", "full list"):
            rows += [(f"{way}, {name}", *_cells(told[way], columns))]
        rows.append(("  full list / probe", *_ratios(told["full list"], told["probe + progress"], columns)))
    for name, told in figures.items():
        for way in ("probe + progress", "full list"):
            each, a_second = told[way], clients / REFRESH_S
            told[way]["etcd_cores"] = a_second * each["etcd_cpu_ms"] / 1e3
            told[way]["bytes_per_s"] = a_second * (each["sent"] + each["received"])
            notes.append(
                f"{name}, {clients} clients that refresh every {REFRESH_S:g} s by {way}: "
                f"{told[way]['etcd_cores']:.1%} of a core of etcd, {size(told[way]['bytes_per_s'])}/s."
            )
    base = figures["1 change/s"]["base"]
    notes.append(
        f"The watches themselves, without refreshes: {figures['nothing changes']['base']['etcd_cores']:.1%} of a "
        f"core of etcd while nothing changes, {base['etcd_cores']:.1%} and {size(base['bytes_per_s'])}/s in all at "
        "1 change/s; both are taken off the rows above."
    )
    return (
        Table(
            f"One refresh: {clients} open watches, {sizes.refresh_instances:,} instances of "
            f"{len(record(namespace, 1).to_bytes()):,} bytes",
            ("each refresh", *columns),
            rows,
            (
                "Bytes as the kernel counts them for each connection (TCP_INFO): HTTP/2 included, TCP/IP not.",
                f"By probe: {sizes.refresh_rounds} rounds of {sizes.refresh_over_s:g} s, a refresh of each client "
                f"in each. Full lists: as many as fit in {sizes.list_within_s:g} s, one at a time.",
                "A full list is only received, neither decoded nor compared; a probe is compared with the mirror.",
                "Bytes at 1 change/s are good to about 0.5 KB: that is one event more or less, to all watches.",
                "Raft entries: what each member must write to its log and sync, and the leader send to all.",
                *notes,
            ),
        ),
        figures,
    )


def _refreshes(etcd: EtcdServer, ones: Children, sizes: Sizes) -> Figures:
    """Measure both ways, less what the open watches cost anyway."""

    def wait() -> list[dict[str, Any]]:
        time.sleep(sizes.refresh_over_s)
        return []

    def lists() -> list[dict[str, Any]]:
        # One process only: more would measure how they wait for each other.
        return [ones.one("list_all", within_s=sizes.list_within_s)]

    base = _measure(etcd, ones, wait)
    ways = {
        "probe + progress": lambda: ones.ask("prove", over_s=sizes.refresh_over_s, seed=1),
        "full list": lists,
    }
    told: Figures = {}
    for way, refresh in ways.items():
        # A full list is dear enough to be measured in one round.
        rounds = [_measure(etcd, ones, refresh) for _ in range(sizes.refresh_rounds if way != "full list" else 1)]
        took = [seconds for one in rounds for seconds in one["took"]]
        net = {
            name: max(0.0, sum(one[name] - base[name] / base["wall_s"] * one["wall_s"] for one in rounds))
            / len(took)
            for name in ("sent", "received", "etcd_cpu_s", "cpu_s", "raft_entries")
        }
        told[way] = {
            "sent": net["sent"],
            "received": net["received"],
            "etcd_cpu_ms": net["etcd_cpu_s"] * 1e3,
            "client_cpu_ms": net["cpu_s"] * 1e3,
            "raft_entries": net["raft_entries"],
            "p50_ms": quantile(took, 0.5) * 1e3,
            "refreshes": len(took),
            "good": sum(one["good"] for one in rounds),
        }
    told["base"] = {
        "etcd_cores": base["etcd_cpu_s"] / base["wall_s"],
        "bytes_per_s": (base["sent"] + base["received"]) / base["wall_s"],
    }
    return told


def _measure(etcd: EtcdServer, ones: Children, work: Callable[[], list[dict[str, Any]]]) -> dict[str, Any]:
    """What a piece of work used, in the clients and in etcd."""
    before, entries = ones.total(), int(etcd.status()["raftIndex"])
    etcd_before, began = etcd.cpu_s(), time.perf_counter()
    answers = work()
    used: dict[str, Any] = {"wall_s": time.perf_counter() - began, "etcd_cpu_s": etcd.cpu_s() - etcd_before}
    used["raft_entries"] = int(etcd.status()["raftIndex"]) - entries
    after = ones.total()
    used |= {name: after[name] - before[name] for name in ("sent", "received", "cpu_s")}
    used["took"] = [seconds for answer in answers for seconds in answer["took"]]
    used["good"] = sum(answer["good"] for answer in answers)
    return used


@contextmanager
def _changing(etcd: EtcdServer, namespace: str, leases: dict[str, int], rate: float) -> Iterator[None]:
    """Meanwhile records are written anew at this rate; at none if it is 0."""
    stop = threading.Event()
    how = {"rate": rate, "for_s": LEASE_S, "stop": stop}
    writer = threading.Thread(target=_change, args=(etcd, namespace, leases), kwargs=how)
    if rate:
        writer.start()
    try:
        yield
    finally:
        stop.set()
        if rate:
            writer.join()


# --- a redeploy storm -----------------------------------------------------------------------------------------


def redeploy_storm(sizes: Sizes) -> tuple[Table, Figures]:
    """Instances register again as new processes: a lease is revoked, another granted, a record created."""
    figures: Figures = {}
    for kind in CONTENDERS:
        figures[kind] = [_storm(kind, sizes.storm_clients, sizes)]
        if not figures[kind][0]["kept_up"]:
            figures[kind].append(_storm(kind, max(1, sizes.storm_clients // 10), sizes))
    rows = [
        (
            f"{CONTENDERS[kind]}, {f['clients']} clients",
            "yes" if f["kept_up"] else "no",
            f"{f['p50_s'] * 1e3:,.0f} ms",
            f"{f['p99_s'] * 1e3:,.0f} ms",
            f"{f['worst_s'] * 1e3:,.0f} ms" + (f" ({f['missed']} missed)" if f["missed"] else ""),
            f"{f['etcd_cores']:.1%}",
            f"{f['client_cores']:.1%}",
            f"{size(f['received_each'])}",
            f"{f['lists_each']:,.1f}",
            f"{f['failures']:,}",
            f"{f['late_s'] * 1e3:,.0f} ms",
            f"{f['changes']:,}",
        )
        for kind, told in figures.items()
        for f in told
    ]
    first = figures["watcher"][0]
    walls = ", ".join(f"{f['wall_s']:.0f} s" for told in figures.values() for f in told)
    return (
        Table(
            f"A redeploy storm: of {sizes.storm_instances} instances {first['changes']} register again in "
            f"{sizes.storm_s:g} s ({sizes.storm_rate:.1f}/s), {sizes.storm_clients} clients watch",
            (
                "",
                "keeps up",
                "p50 to last client",
                "p99",
                "worst",
                "etcd CPU",
                "CPU of each client",
                "received each",
                "full lists each",
                "failures",
                "writer late",
                "changes",
            ),
            rows,
            (
                "To last client: from before the record is created until the last client has it in its index.",
                f"Keeps up: every client had every change within {KEEPS_UP_S:g} s.",
                "CPU in per cent of a core, from the first change until the last client has the last one "
                f"({walls}). All clients share the machine's {os.cpu_count()} cores with etcd and the writer.",
                f"Each change is two events, the old lease's end and the new record: {2 * first['changes']:,} for "
                "each client. Full lists: since the first one. What reads 'missed' some client never had within "
                f"{sizes.storm_patience_s:g} s.",
                "Writer late: how far the writer fell behind its schedule at worst; it ends after twice the time.",
            ),
        ),
        figures,
    )


def _storm(kind: str, clients: int, sizes: Sizes) -> Figures:
    namespace = "storm"
    with fresh_etcd() as (etcd, folder), children(folder, min(clients, sizes.storm_processes)) as ones:
        # Each is used by one thread at a time, and patient: it's the clients that are measured.
        free: SimpleQueue[EtcdRegistry] = SimpleQueue()
        for number in range(_WRITERS):
            free.put(open_etcd(etcd.port, number, timeout_s=30.0))
        registry = open_etcd(etcd.port)
        leases: dict[int, int] = {}
        for number in range(sizes.storm_instances):
            leases[number] = registry.grant(LEASE_S)
            info = record(namespace, number)
            registry.create(namespace, info.agent_id, info.to_bytes(), leases[number])
        ones.share("start", clients, kind=kind, port=etcd.port, namespace=namespace)
        before, etcd_before, began = ones.total(), etcd.cpu_s(), time.monotonic()
        created_at: dict[str, float] = {}
        late_s = 0.0

        def redeploy(number: int) -> None:
            nonlocal late_s
            due = began + number / sizes.storm_rate
            time.sleep(max(0.0, due - time.monotonic()))
            if time.monotonic() > began + 2 * sizes.storm_s:
                return  # so far behind that the rest would take minutes
            late_s = max(late_s, time.monotonic() - due)
            writer = free.get()
            which = number % sizes.storm_instances
            writer.revoke(leases[which])
            lease = leases[which] = writer.grant(LEASE_S)
            info = record(namespace, which, uuid.uuid4().hex)
            body = info.to_bytes()
            created_at[info.incarnation] = time.monotonic()
            writer.create(namespace, info.agent_id, body, lease)
            free.put(writer)

        with ThreadPoolExecutor(_WRITERS) as writers:
            list(writers.map(redeploy, range(max(1, round(sizes.storm_rate * sizes.storm_s)))))
        seen = _wait_seen(ones, set(created_at), clients=clients, patience_s=sizes.storm_patience_s)
        wall_s = time.monotonic() - began
        after, etcd_cpu_s = ones.total(), etcd.cpu_s() - etcd_before
        registry.close()
        while not free.empty():
            free.get().close()
    print(f"  … {CONTENDERS[kind]}, {clients} clients: {wall_s:.0f} s", file=sys.stderr, flush=True)
    used = {name: after[name] - before[name] for name in after}
    complete = {i: seen[i][1] - at for i, at in created_at.items() if seen.get(i, (0,))[0] == clients}
    # Of what somebody never saw it is only known that it took longer than we waited.
    staleness = [complete.get(i, began + wall_s - at) for i, at in created_at.items()]
    worst_s = max(staleness)
    return {
        "clients": clients,
        "changes": len(created_at),
        "kept_up": worst_s <= KEEPS_UP_S and len(complete) == len(created_at),
        "missed": len(created_at) - len(complete),
        "p50_s": quantile(staleness, 0.5),
        "p99_s": quantile(staleness, 0.99),
        "worst_s": worst_s,
        "wall_s": wall_s,
        "etcd_cores": etcd_cpu_s / wall_s,
        "client_cores": used["cpu_s"] / wall_s / clients,
        "received_each": used["received"] / clients,
        "lists_each": used["lists"] / clients,
        "failures": used["failures"],
        "late_s": late_s,
    }


# --- telling --------------------------------------------------------------------------------------------------


Columns = dict[str, tuple[str, str | None]]


def _cells(told: Figures, columns: Columns) -> list[str]:
    """The figures of one row; those without a form are bytes."""
    return [form.format(told[name]) if form else size(told[name]) for name, form in columns.values()]


def _ratios(over: Figures, under: Figures, columns: Columns) -> list[str]:
    """How many times the one is of the other; nothing where counts are compared."""
    counts = ("refreshes", "good", "lists", "missed", "raft_entries")
    return [
        f"{over[name] / under[name]:,.1f} x" if under[name] and name not in counts else ""
        for name, _ in columns.values()
    ]


def _contenders(figures: Figures, columns: Columns) -> list[tuple[str, ...]]:
    rows = [(text, *_cells(figures[kind], columns)) for kind, text in CONTENDERS.items()]
    return [*rows, ("  reload / watch", *_ratios(figures["reload"], figures["watcher"], columns))]


PARTS: dict[str, Callable[[Sizes], tuple[Table, Figures]]] = {
    "cold-start": cold_start,
    "event-to-routable": event_to_routable,
    "refresh-cost": refresh_cost,
    "redeploy-storm": redeploy_storm,
}


def main(arguments: list[str] | None = None) -> None:
    """Run the parts that are asked for."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.registry")
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"one of {', '.join(PARTS)}; default: all")
    parser.add_argument("--quick", action="store_true", help="tiny sizes: shows that it runs, measures nothing")
    parser.add_argument(
        "--storm-s", type=float, help="how long the storm lasts; in 60 s each instance has its turn"
    )

    parser.add_argument("--out", type=Path, default=ROOT / "build" / "bench-registry", help="where figures go")
    chosen = parser.parse_args(arguments)
    if unknown := set(chosen.parts) - PARTS.keys():
        parser.error(f"no part is called {', '.join(sorted(unknown))}; there are {', '.join(PARTS)}")
    sizes = QUICK if chosen.quick else Sizes()
    if chosen.storm_s is not None:
        sizes = replace(sizes, storm_s=chosen.storm_s)
    chosen.out.mkdir(parents=True, exist_ok=True)
    for name in chosen.parts or PARTS:
        began = time.perf_counter()
        table, figures = PARTS[name](sizes)
        print(f"{table}\n  ({name}: {time.perf_counter() - began:.0f} s)\n", flush=True)
        (chosen.out / f"{name}.json").write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
