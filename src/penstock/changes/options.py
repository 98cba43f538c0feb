"""Options of change feeds: passes and ranges, with the names and conditions of Spark 4.2's ``changes()``."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidChangeOptionError
from penstock.feeds.protocol import OpenFeed
from penstock.instants import UNITS, interval_micros, micros_of
from penstock.spark.options import parse_boolean, parse_timestamp

MODES = ("none", "dropCarryovers", "netChanges")
STRATEGIES = ("auto", "micro_batch", "watermark")
EVER = 0
"""Net changes of the whole range."""
COMMIT = -1
"""Net changes of each commit."""


@dataclass(frozen=True)
class ChangeOptions:
    """The passes that are requested."""

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
    """Return the known value that is meant, whatever its case."""
    match = {name.lower(): name for name in known}.get(str(value).lower())
    if match is None:
        raise InvalidChangeOptionError(
            f"{name}={in_quotes(value)}: give one of {', '.join(known)}.{did_you_mean(str(value), known)}",
            condition=f"INVALID_CDC_OPTION.{condition}",
            option=name,
            value=value,
        )
    return match


def flag(name: str, value: object) -> bool:
    """Parse a boolean, also as text."""
    try:
        return parse_boolean(str(value))
    except ValueError as error:
        raise InvalidChangeOptionError(
            f"{name}={in_quotes(value)}: {error}", option=name, value=value
        ) from None


def interval(name: str, text: str) -> int:
    """Parse an interval such as ``1 hour`` or ``1 minute 30 seconds`` into microseconds."""
    micros = interval_micros(str(text))
    if micros is None:
        raise InvalidChangeOptionError(
            f"{name}={in_quotes(text)}: give an interval such as '10 seconds' or '1 hour' "
            f"({', '.join(UNITS)}; no months or years, whose length varies)",
            option=name,
            value=text,
        )
    return micros


def parse_net_window(text: str | None) -> int:
    """Parse a net window: COMMIT, the microseconds of a window, or EVER for None."""
    if text is None:
        return EVER
    if str(text).strip().lower() == "commit":
        return COMMIT
    size = interval("net_window", text)
    if size <= 0:
        raise InvalidChangeOptionError(
            f"net_window={in_quotes(text)}: give 'commit', or an interval above zero",
            option="net_window",
            value=text,
        )
    if size % 1000:
        raise InvalidChangeOptionError(
            f"net_window={in_quotes(text)}: give a whole number of milliseconds, which is what Spark's "
            "watermark counts in",
            option="net_window",
            value=text,
        )
    return size


@dataclass(frozen=True)
class ChangeRange:
    """The range of commits to read, by version or by time in microseconds since 1970; None for no bound."""

    first_version: int | None = None
    last_version: int | None = None
    first_time: int | None = None
    last_time: int | None = None

    @classmethod
    def of(
        cls,
        *,
        starting_version: object = None,
        ending_version: object = None,
        starting_timestamp: object = None,
        ending_timestamp: object = None,
        starting_bound_inclusive: object = True,
        ending_bound_inclusive: object = True,
    ) -> ChangeRange:
        """Check the options as Spark 4.3 does, and that the range is not reversed."""
        versions = [_version("startingVersion", starting_version), _version("endingVersion", ending_version)]
        times = [_time("startingTimestamp", starting_timestamp), _time("endingTimestamp", ending_timestamp)]
        if any(bound is not None for bound in versions) and any(bound is not None for bound in times):
            raise _invalid(
                "CONFLICTING_RANGE_TYPES", "a range is by version or by timestamp: give bounds of one kind"
            )
        _check("Version", *versions)
        _check("Timestamp", *times)
        first = 0 if flag("startingBoundInclusive", starting_bound_inclusive) else 1
        last = 0 if flag("endingBoundInclusive", ending_bound_inclusive) else 1
        return cls(
            _moved(versions[0], first),
            _moved(versions[1], -last),
            _moved(times[0], first),
            _moved(times[1], -last),
        )

    @property
    def is_open(self) -> bool:
        """Whether the range has no start."""
        return self.first_version is None and self.first_time is None

    def start(self, feed: OpenFeed) -> int:
        """Return the version after which to read."""
        if self.first_version is not None:
            return self.first_version - 1
        oldest = feed.oldest()
        if self.first_time is None:
            return oldest
        earlier = False
        for commit in feed.commits(oldest, feed.newest(oldest)):
            if commit.timestamp >= self.first_time:
                if not earlier:
                    # Removed commits may have been in this range.
                    feed.prepare()
                return commit.version - 1
            earlier = True
        return feed.newest(oldest)

    def end(self, feed: OpenFeed, after: int) -> int:
        """Return the version up to which to read."""
        newest = feed.newest(after)
        if self.last_version is not None:
            return max(after, min(self.last_version, newest))
        if self.last_time is None:
            return newest
        end = after
        for commit in feed.commits(after, newest):
            if commit.timestamp <= self.last_time:
                end = commit.version
        return end


def _check(kind: str, first: int | None, last: int | None) -> None:
    if first is None and last is not None:
        raise _invalid(
            "MISSING_STARTING_VERSION" if kind == "Version" else "MISSING_STARTING_TIMESTAMP",
            f"ending{kind} needs a starting{kind}: give both, or neither for the whole feed",
        )
    if first is not None and last is not None and last < first:
        raise _invalid(
            "REVERSED_RANGE", f"ending{kind} is before starting{kind}: swap them", first=first, last=last
        )


def _moved(bound: int | None, by: int) -> int | None:
    return None if bound is None else bound + by


def _version(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        return int(str(value))
    except ValueError:
        raise _invalid(
            "INVALID_VERSION",
            f"{name}={in_quotes(value)}: a version is a whole number",
            option=name,
            value=value,
        ) from None


def _time(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, datetime):
            return micros_of(value)
        return parse_timestamp(str(value))
    except ValueError as error:
        raise _invalid(
            "INVALID_TIMESTAMP", f"{name}={in_quotes(value)}: {error}", option=name, value=value
        ) from None


def _invalid(condition: str, message: str, **parameters: object) -> InvalidChangeOptionError:
    return InvalidChangeOptionError(message, condition=f"INVALID_CDC_OPTION.{condition}", **parameters)
