"""Parser for the options of the data source; Spark's options are texts with case-insensitive names."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TypeVar, overload

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidOptionError
from penstock.instants import micros_of
from penstock.json_text import parse_json
from penstock.queue.checks import check_name

T = TypeVar("T")

CONF_PREFIX = "spark.penstock."
GUARANTEES = ("at_least_once", "exactly_once", "idempotent")
COMMON = ("url", "queue")
INTERNAL = ("limitRows", "limitUrl", "movedBySink")
"""Options that only Penstock itself passes to its source."""
SOURCE = (*COMMON, "consumer", "startingOffsets", "startingTimestamp", "failOnDataLoss",
          "includeMetadataColumns", "rowsPerTask", "maxTasks")  # fmt: skip
BATCH_SOURCE = (*SOURCE, "endingOffsets")
STREAM_SOURCE = (*SOURCE, "maxRowsPerPartition", "maxRowsPerTrigger", "maxBytesPerTrigger", "alignToAppends",
                 *INTERNAL)  # fmt: skip
ANY_SOURCE = tuple(dict.fromkeys((*BATCH_SOURCE, *STREAM_SOURCE)))
BATCH_SINK = (*COMMON, "maxRowsPerWrite")
STREAM_SINK = (*BATCH_SINK, "guarantee", "appId", "allowNewCheckpoint", "allowNewSink")
ALL_OPTIONS = tuple(dict.fromkeys((*ANY_SOURCE, *STREAM_SINK)))
_SPARK_OPTIONS = frozenset({"path", "checkpointlocation", "queryname"})
"""Options that Spark adds."""
_EXCLUSIVE_GROUPS = ({"queue", "path"}, {"consumer", "startingoffsets", "startingtimestamp"})


class OptionReader:
    """Parses options by case-insensitive names, and refuses options that an operation does not support."""

    def __init__(
        self, options: Mapping[str, str], known: Iterable[str], operation: str, others: Iterable[str] = ()
    ) -> None:
        self._options = _lower_names(options)
        by_lower = {name.lower(): name for name in known}
        for name in self._options.keys() - by_lower.keys() - _SPARK_OPTIONS:
            other = next((other for other in others if other.lower() == name), None)
            if other is not None:
                raise InvalidOptionError(
                    f"option {in_quotes(other)} does not apply to a {operation}: leave it out",
                    condition="INVALID_OPTION.UNKNOWN",
                    option=other,
                )
            raise InvalidOptionError(
                f"unknown option {in_quotes(name)} of a {operation}.{did_you_mean(name, by_lower.values())} "
                f"Known options: {', '.join(sorted(by_lower.values()))}",
                condition="INVALID_OPTION.UNKNOWN",
                option=name,
            )

    def spark_option(self, name: str) -> str | None:
        """Return an option that Spark adds; its name is in lower case."""
        return self._options.get(name)

    def text(self, name: str) -> str | None:
        value = self._options.get(name.lower())
        if value == "":
            raise InvalidOptionError(
                f"option {name}='' is empty: give a value, or leave it out",
                condition="INVALID_OPTION.VALUE",
                option=name,
                value=value,
            )
        return value

    def required(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise InvalidOptionError(
                f"option {in_quotes(name)} is missing: set it, or set {CONF_PREFIX}{name} on the session "
                "before penstock.register(spark)",
                condition="INVALID_OPTION.MISSING",
                option=name,
            )
        return value

    @overload
    def value(self, name: str, parse: Callable[[str], T]) -> T | None: ...

    @overload
    def value(self, name: str, parse: Callable[[str], T], default: T) -> T: ...

    def value(self, name: str, parse: Callable[[str], T], default: T | None = None) -> T | None:
        text = self.text(name)
        if text is None:
            return default
        try:
            return parse(text)
        except ValueError as error:
            raise InvalidOptionError(
                f"option {name}={in_quotes(text)}: {error}",
                condition="INVALID_OPTION.VALUE",
                option=name,
                value=text,
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


@dataclass(frozen=True)
class Quota:
    """A query's limit, and its remaining rows when the query starts. The source gets it as options."""

    rows: int
    """The number of rows that the limit lets through over all runs of the query."""
    rows_left: int | None
    """How many more rows to read, if each row counts; None if the query may drop or add rows."""
    since: tuple[int, ...] | None
    """The positions from which ``rows_left`` counts; None for the start of the query."""
    checkpoint: str = field(repr=False)
    """The location of the query's checkpoint."""

    @classmethod
    def of(cls, values: object, checkpoint: str | None) -> Quota | None:
        """Parse the options ``limitRows`` and ``limitUrl``."""
        if values is None and checkpoint is None:
            return None
        if not isinstance(values, Mapping) or checkpoint is None:
            raise InvalidOptionError(
                "limitRows and limitUrl are internal options: use stream.limit(n)",
                condition="INVALID_OPTION.UNKNOWN",
                option="limitRows",
            )
        since: Sequence[int] | None = values.get("since")
        return cls(values["rows"], values.get("left"), None if since is None else tuple(since), checkpoint)

    def options(self) -> dict[str, str]:
        """Return options for the source. Spark redacts options with ``url`` in their name."""
        values = {"rows": self.rows, "left": self.rows_left, "since": self.since}
        return {"limitRows": json.dumps(values), "limitUrl": self.checkpoint}


@dataclass(frozen=True)
class SourceOptions:
    """Options of a read."""

    url: str = field(repr=False)
    queue: str
    consumer: str | None = None
    starting_offsets: str | dict[int, int] | None = None
    """``earliest``, ``latest``, ``consumer``, or row indexes; other partitions use ``earliest``."""
    ending_offsets: str | dict[int, int] = "latest"
    """``earliest``, ``latest``, or row indexes; other partitions use ``latest``."""
    starting_timestamp: int | None = None
    """Microseconds since 1970."""
    fail_on_data_loss: bool = True
    metadata_columns: bool = False
    rows_per_task: int = 2_000_000
    max_tasks: int = 256
    max_rows_per_partition: int | None = None
    max_rows_per_trigger: int | None = None
    max_bytes_per_trigger: int | None = None
    align_to_appends: bool = False
    quota: Quota | None = None
    """The limit of the query, and its remaining rows."""
    moved_by_sink: bool = False
    """Whether the query's sink is known to move the consumer in its own transaction."""

    @property
    def limits_triggers(self) -> bool:
        """Whether a micro-batch may end before the newest row."""
        limits = (self.max_rows_per_partition, self.max_rows_per_trigger, self.max_bytes_per_trigger)
        return self.align_to_appends or any(limit is not None for limit in limits)


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
    """The checkpoint location; the URL may contain a password."""
    query_name: str | None = None


def source_options(
    options: Mapping[str, str], defaults: Mapping[str, str] | None = None, *, streaming: bool | None
) -> SourceOptions:
    """Parse the options of a read; ``streaming`` is None while it is unknown if the read is streaming."""
    known, operation = {
        None: (ANY_SOURCE, "read"),
        False: (BATCH_SOURCE, "batch read"),
        True: (STREAM_SOURCE, "streaming read"),
    }[streaming]
    reader = OptionReader(with_defaults(options, defaults or {}, known), known, operation, ALL_OPTIONS)
    parsed = SourceOptions(
        url=reader.required("url"),
        queue=_queue_name(reader),
        consumer=reader.text("consumer"),
        starting_offsets=reader.value("startingOffsets", _parse_offsets),
        ending_offsets=reader.value("endingOffsets", _parse_ending_offsets, SourceOptions.ending_offsets),
        starting_timestamp=reader.value("startingTimestamp", parse_timestamp),
        fail_on_data_loss=reader.value("failOnDataLoss", parse_boolean, True),
        metadata_columns=reader.value("includeMetadataColumns", parse_boolean, False),
        rows_per_task=reader.value("rowsPerTask", parse_positive, SourceOptions.rows_per_task),
        max_tasks=reader.value("maxTasks", parse_positive, SourceOptions.max_tasks),
        max_rows_per_partition=reader.value("maxRowsPerPartition", parse_positive),
        max_rows_per_trigger=reader.value("maxRowsPerTrigger", parse_positive),
        max_bytes_per_trigger=reader.value("maxBytesPerTrigger", parse_positive),
        align_to_appends=reader.value("alignToAppends", parse_boolean, False),
        quota=Quota.of(reader.value("limitRows", parse_json), reader.text("limitUrl")),
        moved_by_sink=reader.value("movedBySink", parse_boolean, False),
    )
    _check_start(parsed)
    return parsed


def _check_start(options: SourceOptions) -> None:
    if options.starting_offsets is not None and options.starting_timestamp is not None:
        raise InvalidOptionError(
            "startingOffsets and startingTimestamp cannot be combined: set only one of them",
            condition="INVALID_OPTION.CONFLICT",
        )
    start = options.starting_offsets
    if options.consumer is None and start == "consumer":
        raise InvalidOptionError(
            "startingOffsets=consumer needs the option consumer: set it as well",
            condition="INVALID_OPTION.MISSING",
        )
    has_other_start = start not in (None, "consumer") or options.starting_timestamp is not None
    if options.consumer is not None and has_other_start:
        raise InvalidOptionError(
            f"a read starts at the offset of consumer {options.consumer!r}: leave out startingOffsets and "
            "startingTimestamp, or move the consumer with `penstock consumer seek`",
            condition="INVALID_OPTION.CONFLICT",
        )


def sink_options(
    options: Mapping[str, str], defaults: Mapping[str, str] | None = None, *, streaming: bool
) -> SinkOptions:
    """Parse the options of a write."""
    known, operation = (STREAM_SINK, "streaming write") if streaming else (BATCH_SINK, "batch write")
    reader = OptionReader(with_defaults(options, defaults or {}, known), known, operation, ALL_OPTIONS)
    return SinkOptions(
        url=reader.required("url"),
        queue=_queue_name(reader),
        guarantee=reader.value("guarantee", _parse_guarantee, SinkOptions.guarantee),
        app_id=_app_id(reader),
        max_rows_per_write=reader.value("maxRowsPerWrite", parse_positive, SinkOptions.max_rows_per_write),
        allow_new_checkpoint=reader.value("allowNewCheckpoint", parse_boolean, False),
        allow_new_sink=reader.value("allowNewSink", parse_boolean, False),
        checkpoint=reader.spark_option("checkpointlocation"),
        query_name=reader.spark_option("queryname"),
    )


def _app_id(reader: OptionReader) -> str | None:
    app_id = reader.text("appId")
    return None if app_id is None else check_name("app", app_id)


def _queue_name(reader: OptionReader) -> str:
    named, path = reader.text("queue"), reader.text("path")
    if named and path and named != path:
        raise InvalidOptionError(
            f"two queues are named, {named!r} as the option queue, and {path!r}: name only one",
            condition="INVALID_OPTION.CONFLICT",
        )
    queue = named or path
    if queue is None:
        raise InvalidOptionError(
            "no queue is named: use load('orders'), start('orders'), or the option 'queue'",
            condition="INVALID_OPTION.MISSING",
        )
    return queue


def _parse_guarantee(text: str) -> str:
    if text.lower() not in GUARANTEES:
        raise ValueError(f"give one of {', '.join(GUARANTEES)}.{did_you_mean(text, GUARANTEES)}")
    return text.lower()


def _parse_offsets(text: str) -> str | dict[int, int]:
    if text.lower() in ("earliest", "latest", "consumer"):
        return text.lower()
    try:
        parsed = parse_json(text)
        offsets = {int(partition): index for partition, index in parsed.items()}
    except (ValueError, AttributeError):
        offsets = None
    # True is an int in Python, but not a row index.
    if offsets is None or any(type(index) is not int for index in offsets.values()):
        raise ValueError('give earliest, latest, consumer, or row indexes such as {"0": 120, "1": 80}')
    return offsets


def _parse_ending_offsets(text: str) -> str | dict[int, int]:
    if text.lower() == "consumer":
        raise ValueError("a read can end at latest, or at row indexes")
    return _parse_offsets(text)


def with_defaults(
    options: Mapping[str, str], defaults: Mapping[str, str], names: Sequence[str]
) -> dict[str, str]:
    """Add the session's defaults for all ``names`` that no option sets or excludes."""
    lowered = _lower_names(options)
    excluded = {name for group in _EXCLUSIVE_GROUPS if group & lowered.keys() for name in group}
    known = {name.lower() for name in names} - excluded
    return {name: value for name, value in _lower_names(defaults).items() if name in known} | lowered


def _lower_names(options: Mapping[str, str]) -> dict[str, str]:
    return {name.lower(): str(value) for name, value in options.items()}
