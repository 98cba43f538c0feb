"""Writer for checkpoints in Spark's format: micro-batches and continuous queries can both resume from them.

``metadata`` has the query's id. ``offsets/N`` has a version line, a line of metadata, and a line of JSON for
each source. ``commits/N`` has a version line and a line of metadata (format 1, Spark 4.2 and 4.3).

As in Spark's log (HDFSMetadataLog), each entry is written once. If a driver finds that an entry already
exists, another driver is running the query. The offset of an epoch that was begun and never committed stays
until the offset of the committed epoch replaces it atomically, so a checkpoint never has a commit without its
offset, even if a driver dies or wakes up in between. Right before the replacement, the driver checks that no
other driver has committed the epoch. In a local folder, entries are synced to disk.
"""

from __future__ import annotations

import json
import logging
import os
import time
import uuid
from collections.abc import Callable
from contextlib import suppress

from pyarrow import fs

from penstock.commit.protocol import sink_behind_error
from penstock.continuous.connectors.protocol import SinkEpoch, SinkRecord
from penstock.errors import (
    CheckpointMismatchError,
    CheckpointRewoundError,
    CommitRefusedError,
    OwnerFencedError,
)
from penstock.json_text import JsonValue
from penstock.spark.checkpoint import (
    LIMIT_PASSED_SETTING,
    LIMIT_RECORD,
    Checkpoint,
    is_batch_number,
)

log = logging.getLogger("penstock.continuous")

_MAX_GAP = 1000
_COMMIT_ENTRY = 'v1\n{"nextBatchWatermarkMs":0}'


class CheckpointLog(Checkpoint):
    """The checkpoint of a continuous query, in a folder or at a URL; it is created if it does not exist."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        for folder in ("offsets", "commits", "sources/0"):
            self._create_folder(f"{self.root}/{folder}")
        self._oldest_numbers = {folder: self._first_number(folder) for folder in ("offsets", "commits")}
        if self.files.get_file_info(f"{self.root}/metadata").type == fs.FileType.NotFound:
            # If another driver was faster, the query uses that driver's id.
            with suppress(FileExistsError):
                self._create("metadata", json.dumps({"id": str(uuid.uuid4())}))

    def uncommitted(self) -> int | None:
        """Return the last epoch or micro-batch if it was begun and not committed; otherwise None."""
        last_begun, next_number = self.last_planned(), _next_number(self.last_commit())
        return last_begun if last_begun is not None and last_begun >= next_number else None

    def first_uncommitted(self) -> int:
        """Return the first number that may be uncommitted.

        Everything before the last offset is committed, because an epoch only begins after the previous one is
        committed. Commit entries alone do not show this: a driver may die between an offset and its commit.
        """
        return max(_next_number(self.last_commit()), self.last_planned() or 0)

    def begun_entries(self) -> dict[int, bytes]:
        """Return the offset entries of uncommitted epochs by number; usually at most one."""
        first = _next_number(self.last_commit())
        entries = {number: self.offset_entry(number) for number in self.numbers("offsets", first)}
        return {number: entry for number, entry in entries.items() if entry is not None}

    def offset_entry(self, number: int) -> bytes | None:
        """Return an epoch's entry in the offset log; None if there is none."""
        return self.read(f"offsets/{number}")

    def single_offset(self, number: int) -> JsonValue:
        """Return the offset of the query's only source."""
        offsets = self.offsets(number)
        if len(offsets) != 1:
            raise CommitRefusedError(
                f"the checkpoint belongs to a query with {len(offsets)} sources, but a continuous query has "
                "only one: use a new checkpoint",
                condition="COMMIT_REFUSED.SEVERAL_SOURCES",
            )
        return offsets[0]

    def rows_passed(self, number: int | None) -> int:
        """Return how many rows a limit has let through up to an epoch; 0 before the first epoch."""
        if number is None:
            return 0
        rows = self.limit_passed(number)
        if rows is None:
            by_micro_batches = self.read(LIMIT_RECORD) is not None
            earlier_limit = "with a limit that micro-batches count" if by_micro_batches else "without a limit"
            raise CheckpointMismatchError(
                f"the query with checkpoint {self.label!r} ran {earlier_limit} before: start it that way, "
                "or use a new checkpoint; the query then resumes at the consumer's offset",
                condition="CHECKPOINT_MISMATCH.LIMIT_TRIGGER"
                if by_micro_batches
                else "CHECKPOINT_MISMATCH.LIMIT",
                checkpoint=self.label,
            )
        return rows

    def write_offset(
        self,
        number: int,
        offset: object,
        rows_passed: int | None = None,
        *,
        replaced_entry: bytes | None = None,
        committed: bool = False,
    ) -> None:
        """Log the offset of an epoch, and the rows that a limit has let through.

        ``replaced_entry`` is the entry to replace: of an epoch that was begun and never committed, or that
        was ``committed`` to a sink that is gone.
        """
        conf = {} if rows_passed is None else {LIMIT_PASSED_SETTING: str(rows_passed)}
        metadata = {"batchWatermarkMs": 0, "batchTimestampMs": int(time.time() * 1000), "conf": conf}
        name, text = f"offsets/{number}", "\n".join(["v1", json.dumps(metadata), json.dumps(offset)])
        if replaced_entry is None:
            self.add_entry(name, text)
            return

        def is_unchanged() -> bool:
            has_commit = self.read(f"commits/{number}") is not None
            return self.read(name) == replaced_entry and has_commit == committed

        self._replace(name, text, is_unchanged)

    def write_commit(self, number: int) -> None:
        self.add_entry(f"commits/{number}", _COMMIT_ENTRY)

    def delete_commit(self, number: int) -> None:
        self._delete(f"commits/{number}")

    def prune(self, last: int, keep: int) -> None:
        for folder, oldest in self._oldest_numbers.items():
            first_kept = last - keep + 1
            # After a very large gap, list the existing files instead of trying each number.
            numbers = (
                range(oldest, first_kept) if first_kept - oldest <= _MAX_GAP else self.numbers(folder, oldest)
            )
            for number in numbers:
                if number < first_kept:
                    self._delete(f"{folder}/{number}")
            self._oldest_numbers[folder] = max(oldest, first_kept)

    def _first_number(self, folder: str) -> int:
        return min(self.numbers(folder), default=0)

    def numbers(self, folder: str, first: int = 0) -> list[int]:
        entries = self.files.get_file_info(fs.FileSelector(f"{self.root}/{folder}"))
        numbers = (int(info.base_name) for info in entries if is_batch_number(info.base_name))
        return sorted(number for number in numbers if number >= first)

    def add_entry(self, name: str, text: str) -> None:
        try:
            self._create(name, text)
        except FileExistsError:
            raise self._other_driver_error(name) from None
        except FileNotFoundError:
            raise self._folder_missing_error(name) from None

    def _folder_missing_error(self, name: str) -> CommitRefusedError:
        return CommitRefusedError(
            f"cannot write {name} of the checkpoint at {self.label!r}, because its folder was deleted or "
            "moved while the query ran: put it back and restart the query, or start with a new checkpoint",
            condition="COMMIT_REFUSED.CHECKPOINT_DAMAGED",
            checkpoint=self.label,
            file=name,
        )

    def _other_driver_error(self, name: str) -> OwnerFencedError:
        return OwnerFencedError(
            f"{name} of the checkpoint at {self.label!r} was written by another driver of the query: "
            "run each query once",
            condition="OWNER_FENCED.CHECKPOINT",
            checkpoint=self.label,
            file=name,
        )

    def _create_folder(self, path: str) -> None:
        if is_local(self.files):
            create_folder_durably(path)
        else:
            self.files.create_dir(path, recursive=True)

    def _create(self, name: str, text: str) -> None:
        path = f"{self.root}/{name}"
        if is_local(self.files):
            self._delete_checksum(name)
            create_durably(path, text.encode())
            return
        # Object stores only show complete files, and few can refuse to replace a file.
        if self.files.get_file_info(path).type != fs.FileType.NotFound:
            raise FileExistsError(path)
        with self.files.open_output_stream(path) as stream:
            stream.write(text.encode())

    def _replace(self, name: str, text: str, allowed: Callable[[], bool]) -> None:
        path = f"{self.root}/{name}"
        if is_local(self.files):
            self._delete_checksum(name)
            try:
                replaced = replace_durably(path, text.encode(), allowed)
            except FileNotFoundError:
                raise self._folder_missing_error(name) from None
            if not replaced:
                raise self._other_driver_error(name)
            return
        if not allowed():
            raise self._other_driver_error(name)
        with self.files.open_output_stream(path) as stream:
            stream.write(text.encode())

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.files.delete_file(f"{self.root}/{name}")
        self._delete_checksum(name)

    def _delete_checksum(self, name: str) -> None:
        """Delete Hadoop's checksum of a local file; it would not match the new content."""
        folder, _, base = f"{self.root}/{name}".rpartition("/")
        checksum = f"{folder}/.{base}.crc"
        if self.files.get_file_info(checksum).type != fs.FileType.NotFound:
            self.files.delete_file(checksum)


def is_local(files: fs.FileSystem) -> bool:
    return isinstance(files, fs.LocalFileSystem)


def _link_or_rename(temporary: str, path: str) -> None:
    """Publish a file under its name with a hard link: a rename would replace an existing file."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # The file system has no links, so only this check shows whether another driver was faster.
        if os.path.exists(path):
            raise FileExistsError(path) from None
        os.rename(temporary, path)


def create_durably(path: str, content: bytes) -> None:
    """Create a local file atomically; on return, it survives a power failure."""
    _write_durably(path, content, _link_or_rename)


def replace_durably(path: str, content: bytes, allowed: Callable[[], bool]) -> bool:
    """Replace a local file atomically, unless ``allowed`` returns False; return whether it was replaced.

    ``allowed`` is called right before the replacement. On return, the file survives a power failure.
    """
    replaced = False

    def replace(temporary: str, path: str) -> None:
        nonlocal replaced
        replaced = allowed()
        if replaced:
            os.replace(temporary, path)

    _write_durably(path, content, replace)
    return replaced


def _write_durably(path: str, content: bytes, publish: Callable[[str, str], None]) -> None:
    folder, base = os.path.split(path)
    temporary = os.path.join(folder, f".{base}.{uuid.uuid4()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # Unlike os.write, this raises an error if the disk fills up partway.
        with open(descriptor, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(descriptor)
        publish(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(folder)


def create_folder_durably(path: str) -> None:
    """Create a local folder and its missing parents; on return, they survive a power failure."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            # Another driver may have created the folder. A file with that name is an error.
            if not os.path.isdir(folder):
                raise
        _sync_folder(os.path.dirname(folder))


def _sync_folder(path: str) -> None:
    """Sync a folder, so that the names of its files are on disk."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


MovePastCommit = Callable[[JsonValue], None]


def recover(
    checkpoint: CheckpointLog, sink: SinkRecord, move_past_commit: MovePastCommit, *, limited: bool = False
) -> int | None:
    """Prepare a checkpoint for a run of a continuous query; return its last committed epoch.

    An epoch or micro-batch that was logged but not committed is committed if the sink has exactly its rows.
    Otherwise another epoch with the same number replaces it later.
    """
    sink_epoch = catch_up(checkpoint, sink, move_past_commit, limited=limited)
    uncommitted = checkpoint.uncommitted()
    if (
        uncommitted is not None
        and sink_epoch is not None
        and sink_epoch.number == uncommitted
        and sink_epoch.identifies_rows
    ):
        checkpoint.write_commit(uncommitted)
    return checkpoint.last_commit()


def catch_up(
    checkpoint: CheckpointLog, sink: SinkRecord, move_past_commit: MovePastCommit, *, limited: bool = False
) -> SinkEpoch | None:
    """Log the sink's last epoch or micro-batch if the checkpoint lacks it; return it.

    The checkpoint may have lost it in a power failure, because Spark does not sync its files. If the sink
    does not know its offset, because the query has several sources or state, Spark repeats the micro-batch.

    ``move_past_commit`` is called with the offset before it is logged, for a source whose consumer is not
    moved by the sink.
    """
    sink_epoch = sink.newest()
    delete_commit_without_offset(checkpoint, sink_epoch)
    if sink_epoch is None:
        return None
    last_commit = checkpoint.last_commit()
    _require_not_behind(sink, sink_epoch, checkpoint.first_uncommitted())
    _require_not_rewound(sink, sink_epoch, _next_number(last_commit), limited=limited)
    if sink_epoch.offset is None:
        return sink_epoch
    number = sink_epoch.number
    is_missing = number > _number_or_minus_one(last_commit) or checkpoint.offset_entry(number) is None
    differs = (
        not is_missing and number == last_commit and checkpoint.single_offset(number) != sink_epoch.offset
    )
    if differs and not sink_epoch.identifies_rows:
        # If several drivers ran, a sink that may repeat rows keeps the first driver's offset. It may be less
        # than the one that the checkpoint has committed.
        return sink_epoch
    move_past_commit(sink_epoch.offset)
    if is_missing:
        if number - 1 > _number_or_minus_one(last_commit):
            log_offset(checkpoint, number - 1, sink_epoch.previous_offset)
        log_epoch(
            checkpoint, number, sink_epoch.offset, _rows_passed(checkpoint, sink_epoch, limited=limited)
        )
    elif differs:
        _replace_with_sink_offset(checkpoint, sink_epoch, limited=limited)
    return sink_epoch


def _rows_passed(checkpoint: CheckpointLog, sink_epoch: SinkEpoch, *, limited: bool) -> int | None:
    """Return the rows that a limit has let through, including the sink's last epoch; None without a limit."""
    return (
        checkpoint.rows_passed(sink_epoch.number - 1 if sink_epoch.number else None) + sink_epoch.rows
        if limited
        else None
    )


def _replace_with_sink_offset(checkpoint: CheckpointLog, sink_epoch: SinkEpoch, *, limited: bool) -> None:
    """Replace the last committed offset with the sink's offset.

    One driver committed the epoch to a sink that was then dropped, and logged it. Its successor committed an
    epoch with the same number to the recreated sink.
    """
    log_offset(
        checkpoint,
        sink_epoch.number,
        sink_epoch.offset,
        _rows_passed(checkpoint, sink_epoch, limited=limited),
        committed=True,
    )
    log.warning(
        "epoch %d of the checkpoint at %r had other rows than the recreated sink; the sink's rows count",
        sink_epoch.number,
        checkpoint.label,
        extra={
            "action": "offset_replaced",
            "checkpoint": checkpoint.label,
            "epoch": sink_epoch.number,
        },
    )


def delete_commit_without_offset(checkpoint: CheckpointLog, sink_epoch: SinkEpoch | None) -> None:
    """Delete the last commit if its offset is missing, so that the query repeats that micro-batch.

    Spark does not sync its files, so after a power failure the disk may have only one of the two. A commit
    that the sink's record confirms is never deleted. If the previous offset is missing too, someone has
    deleted files, so the commit is kept.
    """
    last_commit = checkpoint.last_commit()
    if (
        not last_commit
        or checkpoint.offset_entry(last_commit) is not None
        or checkpoint.offset_entry(last_commit - 1) is None
    ):
        return
    if sink_epoch is None or sink_epoch.number != last_commit or not sink_epoch.identifies_rows:
        checkpoint.delete_commit(last_commit)


def require_not_behind(checkpoint: CheckpointLog, sink: SinkRecord) -> None:
    """Refuse a sink that lacks committed epochs, because its store was restored from an older backup.

    For a query that may repeat rows; its sink may be ahead of the checkpoint.
    """
    delete_commit_without_offset(checkpoint, None)
    try:
        sink_epoch = sink.newest()
    except CheckpointMismatchError:
        # Another checkpoint has written under the same app id. Rows are repeated, but none are lost.
        return
    if sink_epoch is not None:
        _require_not_behind(sink, sink_epoch, checkpoint.first_uncommitted())


def _number_or_minus_one(number: int | None) -> int:
    return -1 if number is None else number


def _next_number(number: int | None) -> int:
    return _number_or_minus_one(number) + 1


def _require_not_behind(sink: SinkRecord, sink_epoch: SinkEpoch, first_uncommitted: int) -> None:
    if sink_epoch.number < first_uncommitted - 1 and not (sink_epoch.number < 0 and sink.allows_new_sink):
        raise sink_behind_error(
            sink.description, first_uncommitted, None if sink_epoch.number < 0 else sink_epoch.number
        )


def _require_not_rewound(sink: SinkRecord, sink_epoch: SinkEpoch, next_number: int, *, limited: bool) -> None:
    """Refuse a checkpoint that lacks more epochs than the sink knows: it is an old copy."""
    can_supply_offsets = (
        sink_epoch.offset is not None and sink_epoch.previous_offset is not None and not limited
    )
    if sink_epoch.number > next_number and not can_supply_offsets:
        raise CheckpointRewoundError(
            f"{sink.description} has epochs up to {sink_epoch.number} of the query, but the checkpoint ends "
            f"with {next_number - 1}: the checkpoint is an old copy; use the newest one",
            batch_id=next_number,
            last=sink_epoch.number,
        )


def log_epoch(
    checkpoint: CheckpointLog, number: int, offset: JsonValue, rows_passed: int | None = None
) -> None:
    """Log the offset and the commit of an epoch that the sink has."""
    log_offset(checkpoint, number, offset, rows_passed)
    with suppress(OwnerFencedError):
        checkpoint.write_commit(number)


def log_offset(
    checkpoint: CheckpointLog,
    number: int,
    offset: JsonValue,
    rows_passed: int | None = None,
    *,
    committed: bool = False,
) -> None:
    """Log the offset of an epoch that the sink has.

    It replaces an offset that was begun with other rows and never committed, or that was ``committed`` to a
    dropped sink. A driver that was suspended after its commit to the sink may have just logged the epoch
    itself.

    Raises
    ------
    OwnerFencedError
        If another epoch has been committed under its number.
    """
    existing = checkpoint.offset_entry(number)
    replaceable = committed or existing is None or number >= _next_number(checkpoint.last_commit())
    if existing is None or (replaceable and checkpoint.single_offset(number) != offset):
        with suppress(OwnerFencedError):
            checkpoint.write_offset(number, offset, rows_passed, replaced_entry=existing, committed=committed)
    if checkpoint.single_offset(number) != offset:
        raise OwnerFencedError(
            f"epoch {number} has other rows in the checkpoint at {checkpoint.label!r} than in the sink: "
            "another driver writes the checkpoint. Run each query once",
            condition="OWNER_FENCED.CHECKPOINT",
            checkpoint=checkpoint.label,
        )
