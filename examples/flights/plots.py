"""The demo's plots: mean delays by hour, and the latencies of the alerts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.compute as pc

from examples.flights.alerts import Latency

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_CARRIERS = 6


def plot_delays(delays: pa.Table, file: Path) -> None:
    """Plot the mean arrival delay of the largest carriers by hour of the day."""
    plt = _pyplot()
    largest = (
        delays.group_by("carrier").aggregate([("arrivals", "sum")]).sort_by([("arrivals_sum", "descending")])
    )
    figure, axes = plt.subplots(figsize=(9, 5))
    for carrier in largest["carrier"].to_pylist()[:_CARRIERS]:
        rows = delays.filter(pc.equal(delays["carrier"], carrier))
        hour = pc.hour(pc.assume_timezone(rows["hour"].cast(pa.timestamp("us")), "UTC"))
        by_hour = rows.append_column("hour_of_day", hour).group_by("hour_of_day")
        totals = by_hour.aggregate([("delay_minutes", "sum"), ("arrivals", "sum")]).sort_by("hour_of_day")
        busy = totals.filter(pc.greater(totals["arrivals_sum"], 30))
        mean = pc.divide(busy["delay_minutes_sum"], busy["arrivals_sum"])
        axes.plot(busy["hour_of_day"].to_pylist(), mean.to_pylist(), marker="o", label=carrier)
    axes.set(title="Mean arrival delay, NYC 2013", xlabel="hour of arrival (UTC)", ylabel="minutes")
    axes.legend(title="carrier")
    _save(figure, file)


def plot_latencies(latencies: list[Latency], file: Path) -> None:
    """Plot the share of alerts that were visible within a number of milliseconds."""
    plt = _pyplot()
    figure, axes = plt.subplots(figsize=(9, 5))
    for latency in latencies:
        count = len(latency.milliseconds)
        axes.step(
            latency.milliseconds,
            [100 * number / count for number in range(1, count + 1)],
            where="post",
            color="tab:blue" if latency.trigger == "continuous" else "tab:orange",
            linestyle="-" if latency.guarantee == "exactly_once" else "--",
            label=f"{latency.trigger.replace('_', '-')}, {latency.guarantee}",
        )
    axes.set(
        title="Delay alerts: from the append of a row to the alert being visible",
        xscale="log",
        xlabel="milliseconds",
        ylabel="% of alerts visible by then",
    )
    axes.legend(loc="upper left")
    _save(figure, file)


def _pyplot() -> ModuleType:
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _save(figure: Figure, file: Path) -> None:
    for axes in figure.axes:
        axes.grid(alpha=0.3)
    figure.tight_layout()
    figure.savefig(file, dpi=120)
    _pyplot().close(figure)
