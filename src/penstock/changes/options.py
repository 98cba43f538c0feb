"""Options of change feeds: passes and ranges, with the names and conditions of Spark 4.2's ``changes()``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidChangeOptionError
from penstock.feeds.protocol import OpenFeed
from penstock.instants import UNITS, interval_micros, micros_of
from penstock.spark.options import parse_boolean, parse_timestamp

MODES = ("none", "dropCarryovers", "netChanges")
STARTING = ("startingVersion", "startingTimestamp", "startingBoundInclusive")
ENDING = ("endingVersion", "endingTimestamp", "endingBoundInclusive")
STRATEGIES = ("auto", "micro_batch", "watermark")
EVER = 0
"""Net changes of the whole range."""
COMMIT = -1
"""Net changes of each commit."""


@dataclass(frozen=True)
class ChangeOptions:
    """The passes that are requested, and how a stream runs them."""

    mode: str
    compute_updates: bool
    net_window: int
    strategy: str = "auto"
    delay_ms: int = 0
    """For the watermark strategy: how far a commit may lag behind the newest commit."""
    keep_watermark: bool = False

    @classmethod
    def of(
        cls,
        deduplication_mode: str,
        compute_updates: bool,
        net_window: str | None,
        strategy: str = "auto",
        watermark_delay: str = "0 seconds",
        keep_watermark: bool = False,
    ) -> ChangeOptions:
        """Check and convert the arguments of the functions in ``penstock.changes``."""
        return cls(
            one_of("deduplication_mode", deduplication_mode, MODES, "INVALID_DEDUPLICATION_MODE"),
            flag("compute_updates", compute_updates),
            parse_net_window(net_window),
            one_of("strategy", strategy, STRATEGIES, "INVALID_STRATEGY"),
            interval("watermark_delay", watermark_delay) // 1000,
            keep_watermark,
        )

    @property
    def drop_carryovers(self) -> bool:
        return self.mode != "none"

    @property
    def net_changes(self) -> bool:
        return self.mode == "netChanges"


def one_of(name: str, value: str, known: tuple[str, ...], condition: str) -> str:
    """Return the known value that equals the given one, ignoring case."""
    match = {name.lower(): name for name in known}.get(str(value).lower())
    if match is None:
        advice = f"give one of {', '.join(known)}.{did_you_mean(str(value), known)}"
        raise invalid_option(name, value, advice, condition)
    return match


def flag(name: str, value: object) -> bool:
    """Parse a boolean, or the text of one."""
    try:
        return parse_boolean(str(value))
    except ValueError as error:
        raise invalid_option(name, value, str(error)) from None


def interval(name: str, text: str) -> int:
    """Parse an interval such as ``1 hour`` or ``1 minute 30 seconds`` into microseconds."""
    micros = interval_micros(str(text))
    if micros is None:
        raise invalid_option(
            name,
            text,
            f"give an interval such as '10 seconds' or '1 hour' ({', '.join(UNITS)}; no months or years, "
            "whose length varies)",
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
        raise invalid_option("net_window", text, "give 'commit', or an interval longer than zero")
    if size % 1000:
        advice = "give a whole number of milliseconds, the unit of Spark's watermark"
        raise invalid_option("net_window", text, advice)
    return size


@dataclass(frozen=True)
class ChangeRange:
    """The range of commits to read, by version or by time in microseconds since 1970; None for no bound."""

    first_version: int | None = None
    last_version: int | None = None
    first_time: int | None = None
    last_time: int | None = None

    @classmethod
    def of(cls, options: Mapping[str, object]) -> ChangeRange:
        """Parse the options and check them as Spark 4.3 does; also refuse a reversed range."""
        versions = [_version(name, options.get(name)) for name in ("startingVersion", "endingVersion")]
        times = [_time(name, options.get(name)) for name in ("startingTimestamp", "endingTimestamp")]
        if any(bound is not None for bound in versions) and any(bound is not None for bound in times):
            raise _invalid(
                "CONFLICTING_RANGE_TYPES", "a range is by version or by timestamp: give bounds of one kind"
            )
        _check("Version", *versions)
        _check("Timestamp", *times)
        first, last = (
            0 if options.get(name) is None or flag(name, options[name]) else 1
            for name in ("startingBoundInclusive", "endingBoundInclusive")
        )
        return cls(
            _shifted(versions[0], first),
            _shifted(versions[1], -last),
            _shifted(times[0], first),
            _shifted(times[1], -last),
        )

    @property
    def is_open(self) -> bool:
        return self.first_version is None and self.first_time is None

    def start(self, feed: OpenFeed) -> int:
        """Return the version after which to read."""
        if self.first_version is not None:
            return self.first_version - 1
        oldest = feed.oldest()
        if self.first_time is None:
            return oldest
        has_earlier = False
        for commit in feed.commits(oldest, feed.newest(oldest)):
            if commit.timestamp >= self.first_time:
                if not has_earlier:
                    # Commits of this range may have been removed, which prepare() refuses.
                    feed.prepare()
                return commit.version - 1
            has_earlier = True
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
            # The range ends at the first later time, even if times go backwards after it.
            if commit.timestamp > self.last_time:
                break
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


def _shifted(bound: int | None, by: int) -> int | None:
    return None if bound is None else bound + by


def _version(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, bool):
            raise ValueError
        return int(str(value))
    except ValueError:
        raise invalid_option(name, value, "a version is a whole number", "INVALID_VERSION") from None


def _time(name: str, value: object) -> int | None:
    if value is None:
        return None
    try:
        if isinstance(value, datetime):
            return micros_of(value)
        return parse_timestamp(str(value))
    except ValueError as error:
        raise invalid_option(name, value, str(error), "INVALID_TIMESTAMP") from None


def invalid_option(
    name: str, value: object, advice: str, condition: str | None = None
) -> InvalidChangeOptionError:
    return InvalidChangeOptionError(
        f"{name}={in_quotes(value)}: {advice}",
        condition=condition and f"INVALID_CDC_OPTION.{condition}",
        option=name,
        value=value,
    )


def _invalid(condition: str, message: str, **parameters: object) -> InvalidChangeOptionError:
    return InvalidChangeOptionError(message, condition=f"INVALID_CDC_OPTION.{condition}", **parameters)
