"""Options as Spark gives them: text by name, whatever the name's case."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidOption
from penstock.instants import micros_of
from penstock.spark.limit_pushdown import Quota

SPARK_OPTIONS = frozenset({"path", "checkpointlocation", "queryname"})
CONF_PREFIX = "spark.penstock."


class OptionReader:
    """Options by name, whatever their case."""

    def __init__(
        self, given: Mapping[str, str], known: Iterable[str], what: str, others: Iterable[str] = ()
    ) -> None:
        self._given = {name.lower(): str(value) for name, value in given.items()}
        by_lower = {name.lower(): name for name in known}
        for name in self._given.keys() - by_lower.keys() - SPARK_OPTIONS:
            elsewhere = next((other for other in others if other.lower() == name), None)
            if elsewhere is not None:
                raise InvalidOption(
                    f"option {in_quotes(elsewhere)} does not apply to a {what}: leave it out",
                    option=elsewhere,
                )
            raise InvalidOption(
                f"unknown option {in_quotes(name)} of a {what}.{did_you_mean(name, by_lower.values())} "
                f"Known ones: {', '.join(sorted(by_lower.values()))}",
                option=name,
            )

    def own(self, name: str) -> str | None:
        return self._given.get(name)

    def text(self, name: str) -> str | None:
        value = self._given.get(name.lower())
        if value == "":
            raise InvalidOption(
                f"option {name}='' is empty: give a value, or leave it out", option=name, value=value
            )
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidOption(
                f"option {in_quotes(name)} is missing: give it, or set {CONF_PREFIX}{name} on the session before "
                "penstock.register(spark)",
                option=name,
            )
        return value

    def value(self, name: str, parse: Callable[[str], Any], default: Any = None) -> Any:
        text = self.text(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise InvalidOption(
                f"option {name}={in_quotes(text)}: {error}", option=name, value=text
            ) from None


def parse_boolean(text: str) -> bool:
    values = {"true": True, "false": False}
    if text.lower() not in values:
        raise ValueError("give true or false")
    return values[text.lower()]


def parse_positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        number = 0
    if number < 1:
        raise ValueError("give a whole number from 1")
    return number


def parse_timestamp(text: str) -> int:
    if text.isdigit():
        return int(text) * 1000
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        raise ValueError("give a time such as 2026-01-31T12:00:00Z, or milliseconds since 1970") from None
    if moment.tzinfo is None:
        raise ValueError("give the time zone too, such as 2026-01-31T12:00:00Z")
    return micros_of(moment)


# ---- options: The data source's options, parsed once into frozen dataclasses.

GUARANTEES = ("at_least_once", "exactly_once", "idempotent")
COMMON = ("url", "queue")
SOURCE = (*COMMON, "consumer", "startingOffsets", "startingTimestamp", "failOnDataLoss", "includeServiceColumns",
          "rowsPerTask")  # fmt: skip
BATCH_SOURCE = (*SOURCE, "endingOffsets")
STREAM_SOURCE = (*SOURCE, "maxRowsPerPartition", "maxRowsPerTrigger", "maxBytesPerTrigger", "alignToAppends",
                 "limitRows", "limitUrl")  # fmt: skip
ANY_SOURCE = tuple(dict.fromkeys((*BATCH_SOURCE, *STREAM_SOURCE)))
BATCH_SINK = (*COMMON, "maxRowsPerWrite")
STREAM_SINK = (*BATCH_SINK, "guarantee", "appId", "allowNewCheckpoint", "allowNewSink")
ALL_OPTIONS = tuple(dict.fromkeys((*ANY_SOURCE, *STREAM_SINK)))


# Options that exclude each other.
_ONE_OF = ({"queue", "path"}, {"consumer", "startingoffsets", "startingtimestamp"})


@dataclass(frozen=True)
class SourceOptions:
    """Options of a read."""

    url: str = field(repr=False)
    queue: str
    consumer: str | None = None
    starting_offsets: str | dict[int, int] | None = None
    """``earliest``, ``latest``, ``consumer``, or row indexes by partition, the others at ``earliest``."""
    ending_offsets: str | dict[int, int] = "latest"
    """``earliest``, ``latest``, or row indexes by partition, the others at ``latest``."""
    starting_timestamp: int | None = None
    """Microseconds since 1970."""
    fail_on_data_loss: bool = True
    service_columns: bool = False
    rows_per_task: int = 2_000_000
    max_rows_per_partition: int | None = None
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    align_to_appends: bool = False
    quota: Quota | None = None
    """What a limit of the query leaves to read."""


@dataclass(frozen=True)
class SinkOptions:
    """Options of a write."""

    url: str = field(repr=False)
    queue: str
    guarantee: str = "exactly_once"
    app_id: str | None = None
    max_rows_per_write: int = 65_536
    allow_new_checkpoint: bool = False
    allow_new_sink: bool = False
    checkpoint: str | None = field(default=None, repr=False)
    """Where Spark keeps the query's progress; the URL may have a password."""
    query_name: str | None = None


def source_options(given: Mapping[str, str], *, streaming: bool | None) -> SourceOptions:
    """Parse the options of a read; ``streaming`` is None where Spark has not said yet which kind of read it is.

    Raises
    ------
    InvalidOption
        For an unknown option (naming the nearest), a bad value, a missing one, or two that exclude each other.
    """
    known, what = {
        None: (ANY_SOURCE, "read"),
        False: (BATCH_SOURCE, "batch read"),
        True: (STREAM_SOURCE, "streaming read"),
    }[streaming]
    read = OptionReader(given, known, what, ALL_OPTIONS)
    options = SourceOptions(
        url=read.required("url"),
        queue=_queue(read),
        consumer=read.text("consumer"),
        starting_offsets=read.value("startingOffsets", _offsets),
        ending_offsets=read.value("endingOffsets", _ending, SourceOptions.ending_offsets),
        starting_timestamp=read.value("startingTimestamp", parse_timestamp),
        fail_on_data_loss=read.value("failOnDataLoss", parse_boolean, True),
        service_columns=read.value("includeServiceColumns", parse_boolean, False),
        rows_per_task=read.value("rowsPerTask", parse_positive, SourceOptions.rows_per_task),
        max_rows_per_partition=read.value("maxRowsPerPartition", parse_positive),
        max_rows_per_trigger=read.value("maxRowsPerTrigger", parse_positive),
        max_bytes_per_trigger=read.value("maxBytesPerTrigger", parse_positive),
        align_to_appends=read.value("alignToAppends", parse_boolean, False),
        quota=Quota.of(read.value("limitRows", json.loads), read.text("limitUrl")),
    )
    _check_start(options)
    return options


def _check_start(options: SourceOptions) -> None:
    if options.starting_offsets is not None and options.starting_timestamp is not None:
        raise InvalidOption("startingOffsets and startingTimestamp exclude each other: give one of them")
    start = options.starting_offsets
    if options.consumer is None and start == "consumer":
        raise InvalidOption("startingOffsets=consumer needs the option consumer: name one")
    elsewhere = start not in (None, "consumer") or options.starting_timestamp is not None
    if options.consumer is not None and elsewhere:
        raise InvalidOption(
            f"consumer {options.consumer!r} says itself where to start: leave startingOffsets and startingTimestamp "
            "out, and move it with `penstock consumer seek` if need be"
        )


def sink_options(given: Mapping[str, str], *, streaming: bool) -> SinkOptions:
    """Parse the options of a write.

    Raises
    ------
    InvalidOption
        As for :func:`source_options`.
    """
    known, what = (STREAM_SINK, "streaming write") if streaming else (BATCH_SINK, "batch write")
    read = OptionReader(given, known, what, ALL_OPTIONS)
    return SinkOptions(
        url=read.required("url"),
        queue=_queue(read),
        guarantee=read.value("guarantee", _guarantee, SinkOptions.guarantee),
        app_id=read.text("appId"),
        max_rows_per_write=read.value("maxRowsPerWrite", parse_positive, SinkOptions.max_rows_per_write),
        allow_new_checkpoint=read.value("allowNewCheckpoint", parse_boolean, False),
        allow_new_sink=read.value("allowNewSink", parse_boolean, False),
        checkpoint=read.own("checkpointlocation"),
        query_name=read.own("queryname"),
    )


def _queue(read: OptionReader) -> str:
    named, path = read.text("queue"), read.text("path")
    if named and path and named != path:
        raise InvalidOption(f"two queues are named: option queue={named!r} and {path!r}; give one")
    found = named or path
    if found is None:
        raise InvalidOption("no queue is named: load('orders'), start('orders'), or the option 'queue'")
    return found


def _guarantee(text: str) -> str:
    if text.lower() not in GUARANTEES:
        raise ValueError(f"give one of {', '.join(GUARANTEES)}.{did_you_mean(text, GUARANTEES)}")
    return text.lower()


def _offsets(text: str) -> str | dict[int, int]:
    if text.lower() in ("earliest", "latest", "consumer"):
        return text.lower()
    try:
        parsed = json.loads(text)
        offsets = {int(partition): index for partition, index in parsed.items()}
    except (ValueError, AttributeError):
        offsets = None
    # True is an int in Python, and no row index.
    if offsets is None or any(type(index) is not int for index in offsets.values()):
        raise ValueError('give earliest, latest, consumer, or row indexes such as {"0": 120, "1": 80}')
    return offsets


def _ending(text: str) -> str | dict[int, int]:
    if text.lower() == "consumer":
        raise ValueError("a read ends at latest, or at row indexes")
    return _offsets(text)


def with_defaults(
    options: Mapping[str, str], defaults: Mapping[str, str], names: Sequence[str]
) -> dict[str, str]:
    """The options, with the session's defaults for those of ``names`` that are neither given nor excluded by one."""
    given = _lowered(options)
    excluded = {name for group in _ONE_OF if group & given.keys() for name in group}
    known = {name.lower() for name in names} - excluded
    return {name: value for name, value in _lowered(defaults).items() if name in known} | given


def _lowered(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): value for name, value in options.items()}
