"""What the demo shows: a table and a plot."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table

from penstock.demo.proof import Proof

_CARRIERS = 6


def table(proofs: list[Proof], console: Console) -> None:
    """The proof as a table."""
    shown = Table(title="Every row exactly once")
    for column in ("queue or table", "expected", "found", "lost", "repeated", "wrong"):
        shown.add_column(column, justify="left" if column == "queue or table" else "right")
    for proof in proofs:
        values = (proof.expected, proof.found, proof.lost, proof.repeated, proof.wrong)
        shown.add_row(proof.name, *[f"{value:,}" for value in values])
    console.print(shown)


def plot(delays: pa.Table, file: Path) -> None:
    """The mean arrival delay of the largest carriers by hour of the day."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

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
    axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    plt.close(figure)
