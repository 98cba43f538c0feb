"""The demo as a story of five steps: what each one shows, and what it would take in plain PySpark."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

import pyarrow as pa

from examples.flights.alerts import EPOCH, RATE, SHARES, Latency
from examples.flights.change_feed import Summary
from examples.flights.proof import Count, Proof
from examples.flights.tables import (
    BOARD,
    CANCELLED,
    CANCELLED_LIMIT,
    CURRENT,
    DAY,
    DELAYS,
    LAST_DAY_HOURS,
    TOTALS,
)
from penstock.limits import LimitProgress


@dataclass(frozen=True)
class DemoResult:
    """The results of a run, for the report.

    Parameters
    ----------
    feed
        What was written to the change feed.
    killed
        The changes on the board when the job was killed.
    seconds
        From the start of the first job, before the first commit, to the last row.
    resumed
        Whether an earlier run had done a part of it.
    store
        The kind of store.
    cancelled, limit
        The first cancelled flights, and the progress of their query's limit from its checkpoint.
    """

    proofs: list[Proof]
    count: Count
    feed: Summary
    killed: int | None
    seconds: float
    resumed: bool
    store: str
    plot: Path
    preview: str
    preview_picture: Path
    latencies: list[Latency]
    latency_plot: Path
    cancelled: pa.Table
    limit: LimitProgress

    @property
    def holds(self) -> bool:
        """Whether every row arrived exactly once."""
        return all(proof.holds for proof in self.proofs)

    def to_dict(self) -> dict[str, object]:
        """Return the result for JSON."""
        return {
            "holds": self.holds,
            "outputs": [asdict(proof) for proof in self.proofs],
            "rows": self.count.rows,
            "carryovers": self.count.carryovers,
            "updates": self.count.updates,
            "last_day": self.count.day,
            "seconds": round(self.seconds, 3),
            "resumed": self.resumed,
            "plot": str(self.plot),
            "latencies": [latency.to_dict() for latency in self.latencies],
            "latency_plot": str(self.latency_plot),
            "first_cancelled": self.limit.to_dict(),
        }


@dataclass(frozen=True)
class Table:
    """A table of formatted numbers.

    Parameters
    ----------
    text_columns
        How many columns, from the left, are text.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    text_columns: int = 1


@dataclass(frozen=True)
class Step:
    """One of the five steps.

    Parameters
    ----------
    shows
        What was done, and the result.
    in_plain_pyspark
        What it would take without Penstock.
    text
        Preformatted text.
    pictures
        Files, by caption.
    """

    title: str
    shows: str
    in_plain_pyspark: str
    tables: tuple[Table, ...] = ()
    text: str = ""
    pictures: Mapping[str, Path] | None = None


def story(result: DemoResult) -> list[Step]:
    """Return the five steps."""
    return [_queue(result), _changes(result), _modes(result), _continuous(result), _limit(result)]


def summary_line(result: DemoResult) -> str:
    """Summarize how long the run took."""
    rate = "" if result.resumed else f" ({result.count.rows / result.seconds:,.0f} change rows a second)"
    return (
        f"The whole run took {result.seconds:.1f} s{rate}: the year through four queries and the alerts "
        "through four more, with two starts of Spark and a kill."
    )


def verdict(result: DemoResult) -> str:
    """Say whether the proof holds."""
    return "Every row arrived exactly once." if result.holds else "NOT every row arrived exactly once."


def _queue(result: DemoResult) -> Step:
    killed = "" if result.killed is None else f" with {result.killed:,} changes on the board"
    return Step(
        "A queue between a program and Spark",
        f"A program appended {result.feed.rows:,} rows in {result.feed.commits:,} commits to a queue in "
        f"{result.store} while Spark streamed them. The streaming job, driver and JVM, was killed with "
        f"SIGKILL{killed}, and the next one resumed from the checkpoint and the consumer's offsets. A "
        "stateful aggregate ran at the same time. Both outputs were then compared with the input, row by "
        "row, without Spark.",
        "Spark has no durable queue. Kafka is a cluster to run, and Spark's Kafka sink is at-least-once: "
        "after the kill rows repeat, and every reader has to remove duplicates. With files there is a "
        "directory to list, and a writer that must publish its files atomically.",
        (_proof_table("Every row exactly once", result.proofs, (BOARD, DELAYS)),),
        pictures={"Mean arrival delay by hour, from the stateful aggregate": result.plot},
    )


def _changes(result: DemoResult) -> Step:
    count = result.count
    day = ", ".join(f"{number:,} {kind}" for kind, number in sorted(count.day.items()))
    return Step(
        "A change feed without its noise",
        f"Each commit rewrites more flights than have changed. Of {count.rows:,} change rows that went in, "
        f"{count.carryovers:,} were carried over and were dropped, and {count.updates:,} updates were "
        f"computed from pairs of a delete and an insert. The net changes of the last {LAST_DAY_HOURS} hours, "
        f"as a batch over the same feed: {day or 'none'}.",
        "Spark 4.2 and later have these passes for connectors that implement them on the JVM, but not for "
        "Python data sources. In a batch you can write them as a window over row id and version. A stream "
        "needs a watermark and state: it emits a commit only when a later one has arrived, and silently "
        "drops late rows.",
        (_proof_table("The last day as a batch", result.proofs, (DAY,)),),
    )


def _modes(result: DemoResult) -> Step:
    return Step(
        "Output modes, known before the query starts",
        "penstock.modes.preview ran the delays by carrier and hour over a few rows in each mode, without "
        "starting the real query. Two plain SQL tables were then maintained exactly once: the current "
        "flights, by their changes, and each carrier's totals in update mode. The pipeline checked both "
        "before it started them.",
        "You find out by trial what a mode emits. A Python data source has no update mode, so you write a "
        "merge by hand in foreachBatch. After a crash it merges a batch twice, unless it records batch ids "
        "in the same transaction.",
        (_proof_table("The SQL tables", result.proofs, (CURRENT, TOTALS)),),
        text=result.preview,
        pictures={"What each output mode emits, micro-batch by micro-batch": result.preview_picture},
    )


def _continuous(result: DemoResult) -> Step:
    latencies = result.latencies
    alerts = tuple(f"alerts, {trigger}" for trigger in dict.fromkeys(each.trigger for each in latencies))
    return Step(
        "Alerts within milliseconds",
        f"Departures more than an hour late, {RATE} departures a second, each an append, went through the "
        "same transformation with both triggers. With micro-batches a row waits for the previous one to end "
        "and for its own to be planned. The continuous trigger takes rows one by one: an alert is visible "
        f"within milliseconds or, exactly once, when its epoch of {EPOCH} is committed. Each line has "
        f"{len(latencies[0].milliseconds):,} alerts, without those of the warm-up. Latencies start before a "
        "row's append and end when the alert is visible.",
        "Spark's continuous trigger takes no Python source, and with a Python sink it silently loses every "
        "row; its real-time mode takes no Python source either. That leaves micro-batches: "
        f"{_slower(latencies)}",
        (
            _latency_table(latencies),
            _proof_table("The alerts of the exactly-once queries", result.proofs, alerts),
        ),
        pictures={
            "The share of alerts that were visible within a number of milliseconds": result.latency_plot
        },
    )


def _limit(result: DemoResult) -> Step:
    ending = "it stopped by itself" if result.limit.reached else "the feed had no more"
    return Step(
        "Stop when there is enough",
        "A query took the first cancelled flights from the board while it filled, by "
        f"limit({CANCELLED_LIMIT}): {_flight_list(result.cancelled)}. The progress in its checkpoint is "
        f"{result.limit}; {ending}.",
        "df.limit(n) on a stream counts in Spark's state, and the query keeps reading and drops what it "
        "reads. To stop it you need a listener and a count of your own, and by the time the listener is "
        "called, the next batch is running.",
        (_proof_table("The first ones, exactly", result.proofs, (CANCELLED,)),),
    )


def _proof_table(title: str, proofs: list[Proof], names: tuple[str, ...]) -> Table:
    rows = tuple(
        (
            proof.name,
            *(f"{n:,}" for n in (proof.expected, proof.found, proof.lost, proof.repeated, proof.wrong)),
        )
        for proof in proofs
        if proof.name in names
    )
    return Table(title, ("queue or table", "expected", "found", "lost", "repeated", "wrong"), rows)


def _latency_table(latencies: list[Latency]) -> Table:
    rows = tuple(
        (
            latency.trigger.replace("_", "-"),
            latency.guarantee,
            f"{latency.rate:,.0f}",
            *(f"{latency.percentile(share):,.1f}" for share in SHARES.values()),
        )
        for latency in latencies
    )
    columns = ("trigger", "guarantee", "appends/s", *SHARES)
    return Table(
        "Delay alerts: milliseconds from before the append to the alert being visible", columns, rows, 2
    )


def _slower(latencies: list[Latency]) -> str:
    """Compare the medians of micro-batches with those of the continuous trigger."""
    medians = {(latency.trigger, latency.guarantee): latency.percentile(0.5) for latency in latencies}
    ratios = [
        f"{medians['micro_batch', guarantee] / median:,.1f} times as long at the median "
        f"{guarantee.replace('_', ' ')}"
        for (trigger, guarantee), median in medians.items()
        if trigger == "continuous"
    ]
    return " and ".join(ratios) + ", in this run."


def _flight_list(cancelled: pa.Table) -> str:
    rows = cancelled.sort_by([("_commit_version", "ascending"), ("flight_id", "ascending")]).to_pylist()
    return ", ".join(f"{row['carrier']} {row['flight_id']} (hour {row['_commit_version']})" for row in rows)
