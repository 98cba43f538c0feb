"""What the demo shows: the story on the screen, and plots."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from penstock.demo.latency import Latency
from penstock.demo.result import DemoResult
from penstock.demo.story import Step, Table, called, summing_up, verdict

_CARRIERS = 6


def show(steps: list[Step], result: DemoResult, console: Console) -> None:
    """The story, step by step, and how it ends."""
    for number, step in enumerate(steps, 1):
        console.print()
        console.rule(f"{number} of {len(steps)}: {step.title}", align="left")
        console.print(step.shows, highlight=False)
        if step.text:
            console.print()
            console.print(step.text, highlight=False, markup=False, soft_wrap=True)
        for each in step.tables:
            console.print(_rich(each))
        console.print(f"[bold]In plain PySpark:[/] {escape(step.plainly)}", highlight=False)
    console.print()
    console.rule(align="left")
    console.print(summing_up(result), highlight=False)
    console.print(verdict(result), style="bold green" if result.holds else "bold red")


def _rich(table: Table) -> RichTable:
    shown = RichTable(title=table.title, title_justify="left")
    for place, column in enumerate(table.columns):
        shown.add_column(column, justify="left" if place < table.texts else "right")
    for row in table.rows:
        shown.add_row(*row)
    return shown


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
            label=f"{called(each.trigger)}, {each.guarantee}",
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
