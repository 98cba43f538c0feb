"""The files and logs of a checkpoint: planned and committed batches, and their offsets.

This module lists the files once, reads them one by one, and never writes any. ``metadata`` has the query's
id. ``offsets/N`` is written before batch N runs, and ``commits/N`` after the sink's commit. Spark's
micro-batches and continuous queries write the same files, but only the former include Spark's settings (Spark
4.2 and 4.3).
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pyarrow import fs

from penstock.arguments import path_text
from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointNotFoundError, CommitRefusedError, StateRefusedError
from penstock.instants import moment_text
from penstock.json_text import Json, JsonValue, parse_json_object
from penstock.spark.checkpoint import (
    LIMIT_PASSED_SETTING,
    RUNS_KEY,
    Checkpoint,
    is_batch_number,
    parse_offsets,
    redact_location,
    redacted_cause,
)

_SCHEME = re.compile(r"[A-Za-z][A-Za-z0-9+.-]*:")
_LOG_NAMES = {"metadata", "offsets", "commits"}


class CheckpointFiles:
    """A snapshot of the files in a checkpoint."""

    def __init__(self, location: str | os.PathLike[str]) -> None:
        path = path_text("checkpoint", location)
        self.label = redact_location(path)
        # Make the path absolute, since Spark's working directory may be different.
        self.location = path if _SCHEME.match(path) else os.path.abspath(path)
        try:
            self.checkpoint = Checkpoint(self.location)
            kind = self.checkpoint.files.get_file_info(self.checkpoint.root).type
            self._infos = self.checkpoint.tree() if kind == fs.FileType.Directory else {}
        except Exception as error:
            # Leave out the cause, which may contain a password or a signature.
            raise self._unreachable_error(error) from None
        self._require_checkpoint(kind)

    def files_below(self, folder: str) -> Iterator[tuple[str, fs.FileInfo]]:
        """Yield the files below a folder, except hidden ones, with their paths relative to the folder."""
        for path, info in self._infos.items():
            if path.startswith(f"{folder}/") and info.is_file and not info.base_name.startswith("."):
                yield path.removeprefix(f"{folder}/"), info

    def numbers(self, folder: str) -> tuple[int, ...]:
        """Return the file names in a folder that are numbers, in ascending order."""
        return tuple(sorted(int(name) for name, _ in self.files_below(folder) if is_batch_number(name)))

    def written_at(self, name: str) -> datetime | None:
        """Return when a file was last written, in UTC."""
        instant: datetime | None = self._infos[name].mtime if name in self._infos else None
        return instant

    def text(self, name: str) -> str:
        """Read a file as text, or raise ValueError."""
        try:
            content = self.checkpoint.read(name)
        except OSError as error:
            raise ValueError(f"it cannot be read: {redacted_cause(error, self.location)}") from None
        if content is None:
            raise ValueError("it is missing")
        return content.decode()

    def _require_checkpoint(self, kind: fs.FileType) -> None:
        if any(path.partition("/")[0] in _LOG_NAMES for path in self._infos):
            return
        if kind == fs.FileType.NotFound:
            what = "nothing exists there"
        elif kind != fs.FileType.Directory:
            what = "it is a file"
        else:
            what = "the folder has other files" if self._infos else "the folder is empty"
        raise CheckpointNotFoundError(
            f"there is no checkpoint at {self.label!r}: {what}. Pass the query's checkpointLocation, the "
            "folder with 'metadata', 'offsets' and 'commits' in it",
            checkpoint=self.label,
        )

    def _unreachable_error(self, error: Exception) -> StateRefusedError:
        stated_reason = error.parameters.get("reason") if isinstance(error, CommitRefusedError) else None
        reason = stated_reason or redacted_cause(error, self.location)
        return StateRefusedError(
            f"this Python process cannot reach the checkpoint at {self.label!r} "
            f"({reason}): check the address and the credentials. pyarrow and "
            "fsspec can read most file systems (pip install fsspec)",
            condition="STATE_REFUSED.UNREACHABLE",
            checkpoint=self.label,
        )


def may_exist(location: str) -> bool:
    """Return whether a path exists; True if that cannot be checked."""
    try:
        checkpoint = Checkpoint(location)
        return bool(checkpoint.files.get_file_info(checkpoint.root).type != fs.FileType.NotFound)
    except Exception:
        return True


def plain_fields(record: object, *names: str) -> Json:
    """Return fields and properties as JSON values: times as text, and objects as their ``to_dict()``."""
    return {name: _plain_value(getattr(record, name)) for name in names}


def _plain_value(value: Any) -> Any:
    if isinstance(value, datetime):
        return moment_text(value)
    if isinstance(value, tuple):
        return list(map(_plain_value, value))
    return value.to_dict() if hasattr(value, "to_dict") else value


MICRO_BATCH, CONTINUOUS = "micro-batch", "continuous"


@dataclass(frozen=True)
class Source:
    """The offset of one source in a batch."""

    position: int
    """The source's position in the query, from 0."""
    name: str | None
    """The source's name, if the log has names (format 2 of the log)."""
    offset: JsonValue
    """The logged offset, as JSON or text; None if the source had no offset yet."""
    repeated: bool = False
    """Whether the offset is the same as in the previous batch, so that this batch reads nothing from the
    source.
    """

    @property
    def queue(self) -> QueueOffset | None:
        """The rows of a queue in the batch; None for another kind of source."""
        queue_offset = QueueOffset.of(self.offset)
        return (
            replace(queue_offset, start=queue_offset.end)
            if queue_offset is not None and self.repeated
            else queue_offset
        )

    @property
    def feed(self) -> tuple[str, JsonValue, JsonValue] | None:
        """The change feed, and the offsets between which the batch reads it; None for another kind of
        source.
        """
        if not isinstance(self.offset, dict) or not self.offset.keys() >= {"feed", "from", "to"}:
            return None
        end = self.offset["to"]
        return str(self.offset["feed"]), end if self.repeated else self.offset["from"], end

    @property
    def starts(self) -> int | None:
        """How often the query has been started; None unless the source is the counter of starts."""
        if not isinstance(self.offset, dict) or self.offset.keys() != {RUNS_KEY}:
            return None
        starts = self.offset[RUNS_KEY]
        return starts if isinstance(starts, int) else None

    @property
    def kind(self) -> str:
        """``queue``, ``feed``, ``starts`` (a counter of the query's starts, without rows) or ``other``."""
        interpretations = {"queue": self.queue, "feed": self.feed, "starts": self.starts}
        return next((kind for kind, value in interpretations.items() if value is not None), "other")

    def to_dict(self) -> Json:
        """Return all fields as plain values, for JSON."""
        fields: Json = {"source": self.position, "name": self.name, "kind": self.kind}
        queue = self.queue
        if queue is None:
            return {**fields, "offset": self.offset}
        ranges = [
            {"partition": partition, "from": start, "to": end}
            for partition, (start, end) in enumerate(zip(queue.start, queue.end, strict=True))
        ]
        names = {"store": queue.store, "queue": queue.queue, "consumer": queue.consumer}
        return {**fields, **names, "partitions": ranges}


@dataclass(frozen=True)
class Batch:
    """A micro-batch, or an epoch of a continuous query."""

    id: int
    committed: bool = False
    """Whether the batch is in the commit log."""
    engine: str | None = None
    """``micro-batch`` or ``continuous``; None if the files do not show it."""
    planned_at: datetime | None = None
    """When the batch's offsets were logged, by the driver's clock, in UTC."""
    committed_at: datetime | None = None
    """When the batch's entry in the commit log was written, by the file's time."""
    watermark: datetime | None = None
    """The watermark during the batch; None if there was none yet."""
    next_watermark: datetime | None = None
    """The watermark of the next batch, from the commit log."""
    sources: tuple[Source, ...] = ()
    state_ids: bool = False
    """Whether the commit log has the ids of the state's files (format 2 of Spark's state checkpoints)."""
    rows: int | None = None
    """The number of rows that the batch reads from queues. None if it has another source, or if the files do
    not show it.
    """

    def to_dict(self) -> Json:
        """Return all fields as plain values, for JSON."""
        times = ("planned_at", "committed_at", "watermark", "next_watermark")
        return plain_fields(self, "id", "committed", *times, "rows", "sources")


@dataclass(frozen=True)
class Logs:
    """The content of the offset log and the commit log."""

    query_id: str | None
    batches: tuple[int, ...]
    """The committed batches whose offsets are still logged, in ascending order. Spark can read the state of
    these batches.
    """
    committed: Batch | None
    """The last batch in the commit log."""
    planned: Batch | None
    """The last batch in the offset log if it is not committed; otherwise None."""
    unknown: tuple[str, ...]


def read_logs(files: CheckpointFiles) -> Logs:
    """Read those logs of a checkpoint that exist."""
    unknown: list[str] = []
    offsets, commits = files.numbers("offsets"), files.numbers("commits")
    committed = _committed(files, commits[-1], unknown) if commits else None
    is_open = bool(offsets) and (not commits or offsets[-1] > commits[-1])
    planned = _planned(files, offsets[-1], unknown) if is_open else None
    readable = tuple(sorted({*offsets} & {*commits}))
    return Logs(_query_id(files, unknown), readable, committed, planned, tuple(unknown))


def _query_id(files: CheckpointFiles, unknown: list[str]) -> str | None:
    try:
        return str(parse_json_object(files.text("metadata"))["id"])
    except (ValueError, KeyError, TypeError) as error:
        unknown.append(f"the query's id: the file 'metadata' cannot be used ({_brief(error)})")
        return None


def _planned(files: CheckpointFiles, number: int, unknown: list[str]) -> Batch:
    name = f"offsets/{number}"
    try:
        text = files.text(name)
        before = _offsets_before(files, number)
        metadata, sources = _metadata(text), _sources(text, before or [])
        rows = None if before is None else _rows(sources)
    except (ValueError, CommitRefusedError) as error:
        unknown.append(f"offsets of batch {number}: the file {name!r} cannot be used ({_brief(error)})")
        return Batch(number)
    return Batch(
        number,
        # The only setting that an epoch has is the progress of a limit.
        engine=MICRO_BATCH if metadata.get("conf", {}).keys() - {LIMIT_PASSED_SETTING} else CONTINUOUS,
        planned_at=_instant(metadata.get("batchTimestampMs"), f"the time of batch {number}", unknown),
        watermark=_instant(metadata.get("batchWatermarkMs"), f"the watermark of batch {number}", unknown),
        sources=sources,
        rows=rows,
    )


def _offsets_before(files: CheckpointFiles, number: int) -> list[JsonValue] | None:
    """Return the offsets of the previous batch; None if Spark has removed them or they are unusable."""
    if not number:
        return []
    try:
        return parse_offsets(files.text(f"offsets/{number - 1}"))
    except (ValueError, CommitRefusedError):
        return None


def _rows(sources: tuple[Source, ...]) -> int | None:
    """Count the rows that a batch reads from queues."""
    queues = [source.queue for source in sources]
    if any(source.offset is not None and source.kind in ("feed", "other") for source in sources):
        return None
    counts = [sum(queue.end) - sum(queue.start) for queue in queues if queue is not None]
    return sum(counts) if counts else None


def _committed(files: CheckpointFiles, number: int, unknown: list[str]) -> Batch:
    name, next_watermark = f"commits/{number}", f"the watermark after batch {number}"
    batch = replace(_planned(files, number, unknown), committed=True, committed_at=files.written_at(name))
    try:
        metadata = _metadata(files.text(name))
    except ValueError as error:
        unknown.append(f"{next_watermark}: the file {name!r} cannot be used ({_brief(error)})")
        return batch
    return replace(
        batch,
        next_watermark=_instant(metadata.get("nextBatchWatermarkMs"), next_watermark, unknown),
        state_ids=bool(metadata.get("stateUniqueIds")),
    )


def _metadata(text: str) -> Json:
    """Parse the metadata line of a log file. Spark's own continuous engine leaves it empty."""
    version, *lines = text.split("\n")
    if not version.startswith("v") or not lines:
        raise ValueError("it ends within its first line")
    metadata = parse_json_object(lines[0]) if lines[0] else {}
    if not isinstance(metadata.get("conf", {}), dict):
        raise ValueError("its settings are not a JSON object")
    return metadata


def _sources(text: str, before: Sequence[JsonValue]) -> tuple[Source, ...]:
    version, _, *lines = text.split("\n")
    line_names = [line.partition(":")[0] for line in lines if line]
    names: list[str | None] = [*line_names] if version == "v2" else [None] * len(line_names)
    previous_offsets = {json.dumps(offset, sort_keys=True) for offset in before}
    return tuple(
        Source(
            position,
            name,
            offset,
            repeated=offset is not None and json.dumps(offset, sort_keys=True) in previous_offsets,
        )
        for position, (name, offset) in enumerate(zip(names, parse_offsets(text), strict=True))
    )


def _instant(milliseconds: object, what: str, unknown: list[str]) -> datetime | None:
    """Convert milliseconds to an instant; None for 0, which means no watermark yet."""
    if not isinstance(milliseconds, int) or milliseconds <= 0:
        return None
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError):
        # A single row with a wrong event time can move the watermark that far.
        unknown.append(f"{what}: {milliseconds:,} ms since 1970, which is past the year 9999")
        return None


def _brief(error: Exception) -> str:
    return str(error).splitlines()[0][:200] if str(error) else type(error).__name__
