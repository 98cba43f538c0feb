"""Writer for checkpoints in Spark's format, so that either engine resumes from them.

``metadata`` has the query's id. ``offsets/N`` has a version line, a line of metadata, and a line of JSON for
each source. ``commits/N`` has a version line and a line of metadata (format 1, Spark 4.2 and 4.3).

As in Spark's log (HDFSMetadataLog), an entry is written once: a driver that finds it already written is not
the only one. The offset of an epoch that was begun and never committed stays until the offset of the
committed epoch replaces it atomically. So no checkpoint has a commit without its offset, whichever driver
dies or wakes up in between. Right before the replacement, the driver checks that no other one has committed
the epoch. In a local folder, entries are synced to disk when they are written.
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

_MOST_NUMBERS = 1000
_COMMITTED = 'v1\n{"nextBatchWatermarkMs":0}'


class CheckpointLog(Checkpoint):
    """The checkpoint of a continuous query, in a folder or at a URL; created if it does not exist."""

    def __init__(self, location: str) -> None:
        super().__init__(location)
        for folder in ("offsets", "commits", "sources/0"):
            self._create_folder(f"{self.root}/{folder}")
        self._oldest = {folder: self._first(folder) for folder in ("offsets", "commits")}
        if self.files.get_file_info(f"{self.root}/metadata").type == fs.FileType.NotFound:
            # If another driver was first, the query uses the id that it wrote.
            with suppress(FileExistsError):
                self._create("metadata", json.dumps({"id": str(uuid.uuid4())}))

    def unsettled(self) -> int | None:
        """Return the epoch or micro-batch that was begun and not committed; None if there is none."""
        begun, following = self.last_planned(), _next(self.last_commit())
        return begun if begun is not None and begun >= following else None

    def committed_before(self) -> int:
        """Return the number before which everything is committed: an epoch begins after the one before it.

        A driver that died while it logged a committed epoch may have left an offset without its commit.
        """
        return max(_next(self.last_commit()), self.last_planned() or 0)

    def begun(self) -> dict[int, bytes]:
        """Return the entries of epochs that were begun and not committed, by number; usually one."""
        following = _next(self.last_commit())
        entries = {number: self.offset_entry(number) for number in self.numbers("offsets", following)}
        return {number: entry for number, entry in entries.items() if entry is not None}

    def offset_entry(self, number: int) -> bytes | None:
        """Return the content of an epoch's entry in the offset log; None if there is none."""
        return self.read(f"offsets/{number}")

    def only_offset(self, number: int) -> JsonValue:
        """Return the offset of the only source."""
        offsets = self.offsets(number)
        if len(offsets) != 1:
            raise CommitRefusedError(
                f"the checkpoint belongs to a query with {len(offsets)} sources, and a continuous query has "
                "one: use a new checkpoint",
                condition="COMMIT_REFUSED.SEVERAL_SOURCES",
            )
        return offsets[0]

    def passed(self, number: int | None) -> int:
        """Return how many rows a limit had let through at the end of an epoch; 0 if there is no epoch yet."""
        if number is None:
            return 0
        rows = self.limit_passed(number)
        if rows is None:
            counted = self.read(LIMIT_RECORD) is not None
            before = "with a limit that a trigger of micro-batches counts" if counted else "without a limit"
            raise CheckpointMismatchError(
                f"the query at {self.shown!r} has run {before}: keep it as it was, or use a new checkpoint; "
                "the query then resumes at the consumer's offset",
                condition="CHECKPOINT_MISMATCH.LIMIT_TRIGGER" if counted else "CHECKPOINT_MISMATCH.LIMIT",
                checkpoint=self.shown,
            )
        return rows

    def write_offset(
        self,
        number: int,
        offset: object,
        passed: int | None = None,
        *,
        instead: bytes | None = None,
        committed: bool = False,
    ) -> None:
        """Log the offset of an epoch that the sink has, and the rows that a limit has let through.

        ``instead`` is the entry to replace: of an epoch that was begun and never committed, or that was
        ``committed`` to a sink that is gone.
        """
        conf = {} if passed is None else {LIMIT_PASSED_SETTING: str(passed)}
        about = {"batchWatermarkMs": 0, "batchTimestampMs": int(time.time() * 1000), "conf": conf}
        name, text = f"offsets/{number}", "\n".join(["v1", json.dumps(about), json.dumps(offset)])
        if instead is None:
            self.add(name, text)
            return

        def still_there() -> bool:
            done = self.read(f"commits/{number}") is not None
            return self.read(name) == instead and done == committed

        self._replace(name, text, still_there)

    def write_commit(self, number: int) -> None:
        self.add(f"commits/{number}", _COMMITTED)

    def drop_commit(self, number: int) -> None:
        self._delete(f"commits/{number}")

    def prune(self, last: int, keep: int) -> None:
        for folder, oldest in self._oldest.items():
            end = last - keep + 1
            # If very many numbers are missing, list the files that exist instead of trying each number.
            numbers = range(oldest, end) if end - oldest <= _MOST_NUMBERS else self.numbers(folder, oldest)
            for number in numbers:
                if number < end:
                    self._delete(f"{folder}/{number}")
            self._oldest[folder] = max(oldest, end)

    def _first(self, folder: str) -> int:
        return min(self.numbers(folder), default=0)

    def numbers(self, folder: str, first: int = 0) -> list[int]:
        entries = self.files.get_file_info(fs.FileSelector(f"{self.root}/{folder}"))
        numbers = (int(info.base_name) for info in entries if is_batch_number(info.base_name))
        return sorted(number for number in numbers if number >= first)

    def add(self, name: str, text: str) -> None:
        try:
            self._create(name, text)
        except FileExistsError:
            raise self._written_by_another(name) from None
        except FileNotFoundError:
            raise self._deleted(name) from None

    def _deleted(self, name: str) -> CommitRefusedError:
        return CommitRefusedError(
            f"cannot write {name} of the checkpoint at {self.shown!r}, because its folder is gone: it was "
            "deleted or moved while the query ran. Put it back and restart the query, or start with a new "
            "checkpoint",
            condition="COMMIT_REFUSED.CHECKPOINT_DAMAGED",
            checkpoint=self.shown,
            file=name,
        )

    def _written_by_another(self, name: str) -> OwnerFencedError:
        return OwnerFencedError(
            f"{name} of the checkpoint at {self.shown!r} was written by another driver of the query: "
            "run each query once",
            condition="OWNER_FENCED.CHECKPOINT",
            checkpoint=self.shown,
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
            self._drop_checksum(name)
            create_durably(path, text.encode())
            return
        # Object stores show a file only when it is complete, and few can refuse to replace one.
        if self.files.get_file_info(path).type != fs.FileType.NotFound:
            raise FileExistsError(path)
        with self.files.open_output_stream(path) as stream:
            stream.write(text.encode())

    def _replace(self, name: str, text: str, allowed: Callable[[], bool]) -> None:
        path = f"{self.root}/{name}"
        if is_local(self.files):
            self._drop_checksum(name)
            try:
                replaced = replace_durably(path, text.encode(), allowed)
            except FileNotFoundError:
                raise self._deleted(name) from None
            if not replaced:
                raise self._written_by_another(name)
            return
        if not allowed():
            raise self._written_by_another(name)
        with self.files.open_output_stream(path) as stream:
            stream.write(text.encode())

    def _delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.files.delete_file(f"{self.root}/{name}")
        self._drop_checksum(name)

    def _drop_checksum(self, name: str) -> None:
        """Delete Hadoop's checksum of a local file, which would make the new file look damaged."""
        folder, _, base = f"{self.root}/{name}".rpartition("/")
        checksum = f"{folder}/.{base}.crc"
        if self.files.get_file_info(checksum).type != fs.FileType.NotFound:
            self.files.delete_file(checksum)


def is_local(files: fs.FileSystem) -> bool:
    return isinstance(files, fs.LocalFileSystem)


def _link(temporary: str, path: str) -> None:
    """Give a file its name by a link, which, unlike a rename, does not replace an existing file."""
    try:
        os.link(temporary, path)
    except FileExistsError:
        raise
    except OSError:
        # A file system without links: only this check shows whether another driver was first.
        if os.path.exists(path):
            raise FileExistsError(path) from None
        os.rename(temporary, path)


def create_durably(path: str, content: bytes) -> None:
    """Create a local file atomically; when this returns, it survives a loss of power."""
    _write_durably(path, content, _link)


def replace_durably(path: str, content: bytes, allowed: Callable[[], bool]) -> bool:
    """Replace a local file atomically if ``allowed`` returns True right before; return whether it did.

    When this returns, the file survives a loss of power.
    """
    replaced = False

    def replace(temporary: str, path: str) -> None:
        nonlocal replaced
        replaced = allowed()
        if replaced:
            os.replace(temporary, path)

    _write_durably(path, content, replace)
    return replaced


def _write_durably(path: str, content: bytes, name_it: Callable[[str, str], None]) -> None:
    folder, base = os.path.split(path)
    temporary = os.path.join(folder, f".{base}.{uuid.uuid4()}.tmp")
    file = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        # Unlike os.write, this raises an error if the disk is full after a part of the content.
        with open(file, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(file)
        name_it(temporary, path)
    finally:
        with suppress(FileNotFoundError):
            os.unlink(temporary)
    _sync_folder(folder)


def create_folder_durably(path: str) -> None:
    """Create a local folder and its missing parents; when this returns, they survive a loss of power."""
    missing = []
    while not os.path.isdir(path):
        missing.append(path)
        path = os.path.dirname(path)
    for folder in reversed(missing):
        try:
            os.mkdir(folder)
        except FileExistsError:
            # Another driver may have created the folder; a file of that name is an error.
            if not os.path.isdir(folder):
                raise
        _sync_folder(os.path.dirname(folder))


def _sync_folder(path: str) -> None:
    """Sync a folder, so that the names in it are on disk."""
    folder = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


Follow = Callable[[JsonValue], None]


def recover(logs: CheckpointLog, sink: SinkRecord, follow: Follow, *, limited: bool = False) -> int | None:
    """Prepare a checkpoint for a run of the continuous engine; return its last committed epoch.

    An epoch that was logged but not committed, for example by the micro-batch engine, is committed if the
    sink has exactly its rows. Otherwise another epoch with the same number replaces it later.
    """
    newest = catch_up(logs, sink, follow, limited=limited)
    begun = logs.unsettled()
    if begun is not None and newest is not None and newest.number == begun and newest.identified:
        logs.write_commit(begun)
    return logs.last_commit()


def catch_up(
    logs: CheckpointLog, sink: SinkRecord, follow: Follow, *, limited: bool = False
) -> SinkEpoch | None:
    """Log the epoch or micro-batch that the checkpoint lacks; return the last one in the sink.

    The checkpoint may have lost it in a power failure, since Spark does not sync what it writes. If the sink
    does not know the offset, as for a query with several sources or with state, a micro-batch that Spark has
    begun is left to Spark, which repeats it.

    ``follow`` is called with the offset before it is logged, for a source whose consumer the sink does not
    move.
    """
    newest = sink.newest()
    drop_commit_without_offset(logs, newest)
    if newest is None:
        return None
    last = logs.last_commit()
    _require_not_behind(sink, newest, logs.committed_before())
    _require_not_rewound(sink, newest, _next(last), limited=limited)
    if newest.offset is None:
        return newest
    number = newest.number
    lacking = number > _last(last) or logs.offset_entry(number) is None
    other = not lacking and number == last and logs.only_offset(number) != newest.offset
    if other and not newest.identified:
        # If there were several drivers, a sink that may repeat rows keeps the offset of the first, which may
        # end before the offset that the checkpoint has committed.
        return newest
    follow(newest.offset)
    if lacking:
        if number - 1 > _last(last):
            log_offset(logs, number - 1, newest.before)
        log_epoch(logs, number, newest.offset, _passed(logs, newest, limited=limited))
    elif other:
        _follow_new_sink(logs, newest, limited=limited)
    return newest


def _passed(logs: CheckpointLog, newest: SinkEpoch, *, limited: bool) -> int | None:
    """Return the rows that a limit has let through up to the sink's last epoch; None without a limit."""
    return logs.passed(newest.number - 1 if newest.number else None) + newest.rows if limited else None


def _follow_new_sink(logs: CheckpointLog, newest: SinkEpoch, *, limited: bool) -> None:
    """Replace the last committed offset with the sink's.

    The driver that logged it had committed to a sink that was dropped at that moment, and its successor has
    committed the same number to the new sink.
    """
    log_offset(logs, newest.number, newest.offset, _passed(logs, newest, limited=limited), committed=True)
    log.warning(
        "epoch %d of the checkpoint at %r had other rows than the sink, which was recreated; its rows count",
        newest.number,
        logs.shown,
        extra={"action": "offset_replaced", "checkpoint": logs.shown, "epoch": newest.number},
    )


def drop_commit_without_offset(logs: CheckpointLog, newest: SinkEpoch | None) -> None:
    """Drop the last commit if its offset is missing, so that the query repeats that micro-batch.

    Spark does not sync what it writes, so after a loss of power the disk may have only one of the two files.
    A commit that the sink's own record confirms is never dropped. If the offset before is missing too,
    nothing is dropped, since the files must have been deleted.
    """
    last = logs.last_commit()
    if not last or logs.offset_entry(last) is not None or logs.offset_entry(last - 1) is None:
        return
    if newest is None or newest.number != last or not newest.identified:
        logs.drop_commit(last)


def require_not_behind(logs: CheckpointLog, sink: SinkRecord) -> None:
    """Refuse a sink that lacks what the checkpoint has committed, because its store is an older backup.

    For a query that may repeat rows; its sink may be ahead of the checkpoint.
    """
    drop_commit_without_offset(logs, None)
    try:
        newest = sink.newest()
    except CheckpointMismatchError:
        # Another checkpoint has written under the same id: rows are repeated, but none are lost.
        return
    if newest is not None:
        _require_not_behind(sink, newest, logs.committed_before())


def _last(last: int | None) -> int:
    return -1 if last is None else last


def _next(last: int | None) -> int:
    return _last(last) + 1


def _require_not_behind(sink: SinkRecord, newest: SinkEpoch, following: int) -> None:
    if newest.number < following - 1 and not (newest.number < 0 and sink.may_be_new):
        raise sink_behind_error(sink.description, following, None if newest.number < 0 else newest.number)


def _require_not_rewound(sink: SinkRecord, newest: SinkEpoch, following: int, *, limited: bool) -> None:
    """Refuse a checkpoint that lacks more epochs than the sink can supply: it is an old copy."""
    known = newest.offset is not None and newest.before is not None and not limited
    if newest.number > following and not known:
        raise CheckpointRewoundError(
            f"{sink.description} has epochs up to {newest.number} of the query, and the checkpoint ends with "
            f"{following - 1}: the checkpoint is an old copy; use the newest one",
            batch_id=following,
            last=newest.number,
        )


def log_epoch(logs: CheckpointLog, number: int, offset: JsonValue, passed: int | None = None) -> None:
    """Log an epoch that the sink has, with its commit."""
    log_offset(logs, number, offset, passed)
    with suppress(OwnerFencedError):
        logs.write_commit(number)


def log_offset(
    logs: CheckpointLog,
    number: int,
    offset: JsonValue,
    passed: int | None = None,
    *,
    committed: bool = False,
) -> None:
    """Log the offset of an epoch that the sink has, replacing one that was begun with other rows and never
    committed, or was ``committed`` to a sink that is gone.

    A driver that was suspended after its commit to the sink may have just logged it itself.

    Raises
    ------
    OwnerFencedError
        If another epoch has been committed under its number.
    """
    found = logs.offset_entry(number)
    replaceable = committed or found is None or number >= _next(logs.last_commit())
    if found is None or (replaceable and logs.only_offset(number) != offset):
        with suppress(OwnerFencedError):
            logs.write_offset(number, offset, passed, instead=found, committed=committed)
    if logs.only_offset(number) != offset:
        raise OwnerFencedError(
            f"epoch {number} has other rows in the checkpoint at {logs.shown!r} than in the sink: "
            "another driver writes the checkpoint. Run each query once",
            condition="OWNER_FENCED.CHECKPOINT",
            checkpoint=logs.shown,
        )
