"""The options of a change feed, as Spark 4.2+ names them."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidChangeOption
from penstock.instants import UNITS, interval_micros
from penstock.spark.options import boolean

MODES = ("none", "dropCarryovers", "netChanges")
STRATEGIES = ("auto", "micro_batch", "watermark")
EVER = 0
"""The net changes of all that is there."""
COMMIT = -1
"""The net changes of each commit."""


@dataclass(frozen=True)
class ChangeOptions:
    """What is asked for."""

    mode: str
    compute_updates: bool
    net_window: int

    @property
    def drop_carryovers(self) -> bool:
        return self.mode != "none"

    @property
    def net_changes(self) -> bool:
        return self.mode == "netChanges"


def one_of(name: str, value: str, known: tuple[str, ...], condition: str) -> str:
    """The known value that is meant, whatever its case."""
    found = {each.lower(): each for each in known}.get(str(value).lower())
    if found is None:
        raise InvalidChangeOption(
            f"{name}={in_quotes(value)}: give one of {', '.join(known)}.{did_you_mean(str(value), known)}",
            condition=f"INVALID_CDC_OPTION.{condition}",
            option=name,
            value=value,
        )
    return found


def flag(name: str, value: object) -> bool:
    """A truth value, also as text."""
    try:
        return boolean(str(value))
    except ValueError as error:
        raise InvalidChangeOption(f"{name}={in_quotes(value)}: {error}", option=name, value=value) from None


def interval(name: str, text: str) -> int:
    """The microseconds of an interval such as ``1 hour`` or ``1 minute 30 seconds``."""
    found = interval_micros(str(text))
    if found is None:
        raise InvalidChangeOption(
            f"{name}={in_quotes(text)}: give an interval such as '10 seconds' or '1 hour' ({', '.join(UNITS)}; no months "
            "or years, whose length varies)",
            option=name,
            value=text,
        )
    return found


def net_window(text: str | None) -> int:
    """COMMIT, the microseconds of a window, or EVER where none is named."""
    if text is None:
        return EVER
    if str(text).strip().lower() == "commit":
        return COMMIT
    size = interval("net_window", text)
    if size <= 0:
        raise InvalidChangeOption(
            f"net_window={in_quotes(text)}: give 'commit', or an interval of some length",
            option="net_window",
            value=text,
        )
    if size % 1000:
        raise InvalidChangeOption(
            f"net_window={in_quotes(text)}: give a whole number of milliseconds, which is what Spark's watermark counts in",
            option="net_window",
            value=text,
        )
    return size
