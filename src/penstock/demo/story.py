"""The demo as a story of five steps: what each shows, and what it would have cost in plain PySpark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa

from penstock.demo.alerts import INTERVAL, RATE
from penstock.demo.latency import Latency
from penstock.demo.proof import Proof
from penstock.demo.result import DemoResult
from penstock.demo.tables import BOARD, CANCELLED, CURRENT, DAY, DELAYS, FIRST, HOURS, TOTALS

SHARES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}


@dataclass(frozen=True)
class Table:
    """Numbers as people read them; the columns of text come first.

    Parameters
    ----------
    texts
        How many columns are text.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    texts: int = 1


@dataclass(frozen=True)
class Step:
    """One of the five.

    Parameters
    ----------
    shows
        What was done and found.
    plainly
        What it would have cost in plain PySpark.
    text
        Text whose lines stay as they are.
    pictures
        By what they show.
    """

    title: str
    shows: str
    plainly: str
    tables: tuple[Table, ...] = ()
    text: str = ""
    pictures: Mapping[str, Path] | None = None


def story(result: DemoResult) -> list[Step]:
    """The five steps."""
    return [_queue(result), _changes(result), _modes(result), _continuous(result), _limit(result)]


def summing_up(result: DemoResult) -> str:
    """What all of it took."""
    rate = f" ({result.count.rows / result.seconds:,.0f} change rows a second)"
    return (
        f"All of it took {result.seconds:.1f} s{'' if result.resumed else rate}, the year through four queries, the alerts through "
        "four more, two Spark starts and a kill included."
    )


def verdict(result: DemoResult) -> str:
    """Whether the proof holds, in words."""
    return "Every row arrived exactly once." if result.holds else "NOT every row arrived exactly once."


def _queue(result: DemoResult) -> Step:
    feed, killed = (
        result.feed,
        "" if result.killed is None else f" with {result.killed:,} changes on the board",
    )
    return Step(
        "A queue between a program and Spark",
        f"A program wrote {feed.rows:,} rows in {feed.commits:,} commits into a queue in {result.store}, while Spark streamed them on. "
        f"The streaming job, driver and JVM, was killed with SIGKILL{killed}, and the next one went on where the checkpoint and the "
        "consumer stood. A stateful aggregate ran beside. Both outputs were then compared with the input, row for row, without Spark.",
        "Spark brings no durable queue of its own. With Kafka there is a cluster to run, and Spark's Kafka sink is at-least-once: rows "
        "come again after the kill, and whoever reads has to find them out. With files there is a directory to list, and a writer "
        "that has to put its files there whole.",
        (_proof("Every row exactly once", result.proofs, (BOARD, DELAYS)),),
        pictures={"Mean arrival delay by hour, from the stateful aggregate": result.plot},
    )


def _changes(result: DemoResult) -> Step:
    count = result.count
    day = ", ".join(f"{number:,} {kind}" for kind, number in sorted(count.day.items()))
    return Step(
        "A change feed without its noise",
        f"Each commit rewrites more flights than have changed. Of {count.rows:,} change rows that went in, {count.carryovers:,} were "
        f"carried over and were dropped, and {count.updates:,} updates were found in pairs of a delete and an insert. The net changes of "
        f"the last {HOURS} hours, as a batch over the same feed: {day or 'none'}.",
        "Spark 4.2 and later have these passes for connectors that implement them on the JVM; a Python source is not offered them. By "
        "hand it is a window over row id and version in a batch. On a stream it is a watermark with state, which gives a commit "
        "when a later one has come, and drops in silence what comes late.",
        (_proof("The last day as a batch", result.proofs, (DAY,)),),
    )


def _modes(result: DemoResult) -> Step:
    return Step(
        "Output modes, known before the query starts",
        "ps.modes.preview ran the delays by carrier and hour over a few rows in each mode, without a query of the real data. Two "
        "plain SQL tables were then kept exactly once: the flights as they are now, by their changes, and each carrier's "
        "totals in update mode. The pipeline checked both before it started them.",
        "What a mode emits is found by trying. A Python data source takes no update mode, so it is foreachBatch with a merge written "
        "by hand, which repeats itself after a crash unless it keeps a ledger of batch ids in the same transaction.",
        (_proof("The SQL tables", result.proofs, (CURRENT, TOTALS)),),
        text=result.preview,
        pictures={"What each output mode emits, micro-batch by micro-batch": result.preview_picture},
    )


def _continuous(result: DemoResult) -> Step:
    found = result.latencies
    alerts = tuple(f"alerts, {trigger}" for trigger in dict.fromkeys(each.trigger for each in found))
    return Step(
        "Alerts within milliseconds",
        f"Departures more than an hour late, {RATE} departures a second, each an append, through the same transformation with both "
        "triggers. With micro-batches a row waits for the one before its own and for the planning of its own. The continuous trigger "
        f"takes rows one by one: an alert is visible within milliseconds, or, exactly once, when its epoch of {INTERVAL} is "
        f"committed. {len(found[0].milliseconds):,} alerts in each line, without those of the warm-up before; times are from before a row's append "
        "to its being visible.",
        "Spark's continuous trigger takes no Python source, and with a Python sink it loses every row in silence; its real-time mode takes "
        f"no Python source either. Micro-batches are what is left: {_faster(found)}",
        (_latencies(found), _proof("The alerts that came exactly once", result.proofs, alerts)),
        pictures={"The share of alerts that were visible within some milliseconds": result.latency_plot},
    )


def _limit(result: DemoResult) -> Step:
    ending = "it ended by itself" if result.limit.reached else "there were no more"
    return Step(
        "Stop when there is enough",
        f"A query took the first cancelled flights from the board while it filled, by limit({FIRST}): {_named(result.cancelled)}. Its "
        f"checkpoint says {result.limit}; {ending}.",
        "df.limit(n) on a stream keeps the count in Spark's state, and the query reads on for ever and drops what it reads. To stop is "
        "a listener, a count of one's own, and a race between the two.",
        (_proof("The first ones, exactly", result.proofs, (CANCELLED,)),),
    )


def _proof(title: str, proofs: list[Proof], names: tuple[str, ...]) -> Table:
    shown = [proof for proof in proofs if proof.name in names]
    rows = (
        (each.name, *(f"{n:,}" for n in (each.expected, each.found, each.lost, each.repeated, each.wrong)))
        for each in shown
    )
    return Table(title, ("queue or table", "expected", "found", "lost", "repeated", "wrong"), tuple(rows))


def _latencies(found: list[Latency]) -> Table:
    rows = (
        (
            called(each.trigger),
            each.guarantee,
            f"{each.rate:,.0f}",
            *(f"{each.percentile(share):,.1f}" for share in SHARES.values()),
        )
        for each in found
    )
    columns = ("trigger", "guarantee", "appends/s", *SHARES)
    return Table("Delay alerts: milliseconds from before an append to being visible", columns, tuple(rows), 2)


def _faster(found: list[Latency]) -> str:
    """How much longer micro-batches took, in this run."""
    told = []
    for ours in (each for each in found if each.trigger == "continuous"):
        for peer in found:
            if peer.guarantee == ours.guarantee and peer.trigger != ours.trigger:
                times = peer.percentile(0.5) / ours.percentile(0.5)
                told.append(f"{times:,.1f} times as long at the median {ours.guarantee.replace('_', ' ')}")
    return " and ".join(told) + ", in this run."


def called(trigger: str) -> str:
    """A trigger as people write it."""
    return trigger.replace("_", "-")


def _named(cancelled: pa.Table) -> str:
    rows = cancelled.sort_by([("_commit_version", "ascending"), ("flight_id", "ascending")]).to_pylist()
    return ", ".join(f"{row['carrier']} {row['flight_id']} (hour {row['_commit_version']})" for row in rows)
