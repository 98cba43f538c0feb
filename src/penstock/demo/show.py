"""What the demo shows: tables and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from penstock.demo.alerts import INTERVAL
from penstock.demo.latency import Latency
from penstock.demo.proof import Proof
from penstock.demo.tables import FIRST
from penstock.limits import LimitProgress

_CARRIERS = 6
_SHARES = (0.5, 0.9, 0.99)


def table(proofs: list[Proof], console: Console) -> None:
    """The proof as a table."""
    shown = Table(title="Every row exactly once")
    for column in ("queue or table", "expected", "found", "lost", "repeated", "wrong"):
        shown.add_column(column, justify="left" if column == "queue or table" else "right")
    for proof in proofs:
        values = (proof.expected, proof.found, proof.lost, proof.repeated, proof.wrong)
        shown.add_row(proof.name, *[f"{value:,}" for value in values])
    console.print(shown)


def cancelled(flights: pa.Table, progress: LimitProgress, console: Console) -> None:
    """The first cancelled flights, and what the checkpoint says of their limit."""
    rows = flights.sort_by([("_commit_version", "ascending"), ("flight_id", "ascending")]).to_pylist()
    named = ", ".join(f"{row['carrier']} {row['flight_id']} (hour {row['_commit_version']})" for row in rows)
    console.print(
        f"The first cancelled flights, from the live board by limit({FIRST}): {named}.", highlight=False
    )
    ending = "it ended by itself" if progress.reached else "there were no more"
    console.print(f"The limit of that query, by its checkpoint: {progress}; {ending}.\n", highlight=False)


def latencies(found: list[Latency], store: str, console: Console) -> None:
    """What the alerts took, as a table, and what it shows."""
    shown = Table(title="Delay alerts: milliseconds from before a row's append to its being visible")
    for column in ("trigger", "guarantee", "appends/s", "p50", "p90", "p99"):
        shown.add_column(column, justify="left" if column in ("trigger", "guarantee") else "right")
    for each in found:
        taken = [f"{each.percentile(share):,.1f}" for share in _SHARES]
        shown.add_row(_called(each.trigger), each.guarantee, f"{each.rate:,.0f}", *taken)
    console.print(shown)
    console.print(
        f"{len(found[0].milliseconds):,} alerts in each line, of the same departures through the same transformation, in {store}: a row "
        "waits for the micro-batch before its own and for the planning of its own; the continuous trigger takes rows one by one, "
        f"so an alert is visible within milliseconds, or, exactly once, when its epoch of {INTERVAL} is committed.",
        highlight=False,
    )


def _called(trigger: str) -> str:
    return trigger.replace("_", "-")


def latency_plot(found: list[Latency], file: Path) -> None:
    """The share of alerts that were visible within some milliseconds."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 5))
    for each in found:
        count = len(each.milliseconds)
        axes.step(
            each.milliseconds,
            [100 * number / count for number in range(1, count + 1)],
            where="post",
            color="tab:blue" if each.trigger == "continuous" else "tab:orange",
            linestyle="-" if each.guarantee == "exactly_once" else "--",
            label=f"{_called(each.trigger)}, {each.guarantee}",
        )
    axes.set(
        title="Delay alerts: from a row's append to its being visible",
        xscale="log",
        xlabel="milliseconds",
        ylabel="% of alerts visible by then",
    )
    axes.legend(loc="upper left")
    _save(figure, file)


def plot(delays: pa.Table, file: Path) -> None:
    """The mean arrival delay of the largest carriers by hour of the day."""
    plt = _pyplot()
    largest = (
        delays.group_by("carrier").aggregate([("arrivals", "sum")]).sort_by([("arrivals_sum", "descending")])
    )
    figure, axes = plt.subplots(figsize=(9, 5))
    for carrier in largest["carrier"].to_pylist()[:_CARRIERS]:
        one = delays.filter(pc.equal(delays["carrier"], carrier))
        hour = pc.hour(pc.assume_timezone(one["hour"].cast(pa.timestamp("us")), "UTC"))
        by_hour = one.append_column("of_day", hour).group_by("of_day")
        totals = by_hour.aggregate([("delay_minutes", "sum"), ("arrivals", "sum")]).sort_by("of_day")
        busy = totals.filter(pc.greater(totals["arrivals_sum"], 30))
        mean = pc.divide(busy["delay_minutes_sum"], busy["arrivals_sum"])
        axes.plot(busy["of_day"].to_pylist(), mean.to_pylist(), marker="o", label=carrier)
    axes.set(title="Mean arrival delay, NYC 2013", xlabel="hour of arrival (UTC)", ylabel="minutes")
    axes.legend(title="carrier")
    _save(figure, file)


def _pyplot() -> Any:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Any, file: Path) -> None:
    """Save it, and let go of it."""
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    _pyplot().close(figure)
