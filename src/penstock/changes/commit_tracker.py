"""Commit tracker on the driver: checks the commits of each task against other tasks and micro-batches."""

from __future__ import annotations

import logging
import re
import threading
from collections import OrderedDict, deque
from collections.abc import Iterable
from typing import TypeAlias

import numpy as np
import pyarrow as pa
import pyarrow.types as pat
from numpy.typing import NDArray
from pyarrow import fs
from pyspark.sql import SparkSession

from penstock.arrow.segments import read_stored_table
from penstock.changes.passes.rows import EVENT_TIME
from penstock.changes.stage import Scope, SeenCommits, ipc_stream, refusal
from penstock.errors import (
    ChangelogContractViolationError,
    CommitRefusedError,
    InvalidChangeOptionError,
    PenstockError,
    condition_of,
)
from penstock.instants import moment_of
from penstock.json_text import parse_json
from penstock.spark.checkpoint import MAX_FILE_BYTES, Checkpoint
from penstock.spark.driver_endpoint import Address, DriverEndpoint
from penstock.spark.internals.plans import watermarks_above
from penstock.spark.internals.sessions import running_checkpoint, running_plan
from penstock.store.forks import ForkSafeLock

Version: TypeAlias = int | str
log = logging.getLogger("penstock.changes")
GENERATION = 50_000
GENERATIONS = 20
"""Generations of versions that are kept in memory: one million versions."""
COMPACT_EVERY = 50
JOURNAL_COMMITS = 1_000_000
_NAME = re.compile(r"(\d+)(\.all)?\.arrow")
_EXECUTIONS = 64
"""Batch queries whose commits are kept in memory."""
_STREAMS = 1024
"""Feeds of streaming queries whose commits are kept in memory; others are read from their journals again."""

_guard = ForkSafeLock()
_running: dict[str, DriverEndpoint] = {}


def commit_tracker_address(spark: SparkSession) -> Address:
    """Return the address of the driver's commit tracker for a session's tasks; the first call starts it."""
    application = spark.sparkContext.applicationId
    with _guard:
        if application not in _running:
            for endpoint in _running.values():
                endpoint.close()
            _running.clear()
            _running[application] = DriverEndpoint(spark, CommitTracker(spark).answer)
        return _running[application].address


class CommitTracker:
    """The commits that tasks have reported for the feeds of one session."""

    def __init__(self, spark: SparkSession) -> None:
        self._spark = spark
        self._guard = threading.Lock()
        self._executions: OrderedDict[tuple[str, str], Commits] = OrderedDict()
        self._feeds: OrderedDict[tuple[str, str], FeedCommits] = OrderedDict()

    def answer(self, question: bytes) -> bytes:
        """Add the commits that a task reports; return the error for the task to raise, or nothing."""
        seen = SeenCommits.from_bytes(question)
        try:
            if seen.scope.query is None:
                with self._guard:
                    self._execution(seen.scope).add_commits(seen.commits)
            else:
                self._feed(seen.scope).add(seen)
        except PenstockError as error:
            return refusal(error)
        return b""

    def _execution(self, scope: Scope) -> Commits:
        key = (scope.feed, scope.execution)
        commits = self._executions.setdefault(key, Commits(allow_several_times=scope.repeats))
        self._executions.move_to_end(key)
        if len(self._executions) > _EXECUTIONS:
            self._executions.popitem(last=False)
        return commits

    def _feed(self, scope: Scope) -> FeedCommits:
        assert scope.query is not None
        with self._guard:
            key = (scope.query, scope.feed)
            if key not in self._feeds or self._feeds[key].run != scope.run:
                if scope.delay_ms is not None:
                    refuse_watermarks(self._plan(scope.query))
                # A run may repeat an earlier micro-batch, so each begins with the journal.
                self._feeds[key] = FeedCommits(scope, journal_of(self._spark, scope.query, scope.feed))
            self._feeds.move_to_end(key)
            if len(self._feeds) > _STREAMS:
                self._feeds.popitem(last=False)
            return self._feeds[key]

    def _plan(self, query_id: str) -> object:
        """Return the JVM's logical plan of a running query; None if it has ended."""
        try:
            return running_plan(self._spark, query_id)
        except Exception as error:
            log.warning(
                "the plan of query %s cannot be inspected: %s",
                query_id,
                type(error).__name__,
                extra={"action": "plan_unseen", "query_id": query_id, "error": condition_of(error)},
            )
            return None


class FeedCommits:
    """The commits of one feed in one run of a streaming query."""

    def __init__(self, scope: Scope, journal: Journal | None) -> None:
        self.run = scope.run
        self._guard = threading.Lock()
        self._journal = journal
        self._in_flight: dict[Version, int] = {}
        several = scope.repeats
        if scope.delay_ms is None:
            self._commits: WholeCommits | LateCommits = WholeCommits(allow_several_times=several)
        else:
            watermark = journal.watermark(scope.batch) if journal else 0
            self._commits = LateCommits(scope.delay_ms, watermark, allow_several_times=several)
        for batch, commits in journal.read() if journal else ():
            if batch <= scope.batch:
                self._begin_batch(batch)
                _add_newest(self._commits.times, commits)
                _add_newest(self._in_flight, commits)

    def add(self, seen: SeenCommits) -> None:
        """Add the commits that a task has seen, and write them to the journal."""
        batch = seen.scope.batch
        with self._guard:
            if batch < self._commits.batch:
                # A task of an earlier micro-batch, whose result is no longer needed.
                return
            if batch > self._commits.batch:
                self._begin_batch(batch)
                if self._journal is not None:
                    self._journal.compact(batch)
            self._commits.add_commits(seen.commits)
            changed = _add_newest(self._in_flight, seen.commits)
            if self._journal is not None and changed:
                versions = pa.array(self._in_flight.keys(), seen.commits.schema.field(0).type)
                times = pa.array(self._in_flight.values(), pa.int64())
                self._journal.write(batch, pa.table({"version": versions, "timestamp": times}))

    def _begin_batch(self, batch: int) -> None:
        self._commits.begin_batch(batch)
        self._in_flight = {}


def _add_newest(times: dict[Version, int], commits: pa.Table) -> bool:
    """Record the newest time of each version; return whether ``times`` has changed."""
    changed = False
    for version, time in zip(*(column.to_pylist() for column in commits.columns), strict=True):
        if version not in times or times[version] < time:
            times[version] = time
            changed = True
    return changed


class Commits:
    """The commits of a batch query, or of the micro-batch in flight.

    ``allow_several_times`` allows the changes of one version to have different times. This is needed if
    versions are log positions: a connector gives all rows of a snapshot the position that it read last.
    """

    def __init__(self, *, allow_several_times: bool = False) -> None:
        self.batch = -1
        self.times: dict[Version, int] = {}
        self._allow_several_times = allow_several_times

    def add_commits(self, commits: pa.Table) -> None:
        if not self._allow_several_times:
            self._check_times(commits)
        _add_newest(self.times, commits)

    def _check_times(self, commits: pa.Table) -> None:
        versions, times = commits.column(0).to_pylist(), commits.column(1).to_pylist()
        by_version = dict(zip(versions, times, strict=True))
        if len(by_version) < len(versions):
            version, time = next(
                pair for pair in zip(versions, times, strict=True) if by_version[pair[0]] != pair[1]
            )
            _refuse_timestamps(version, time, by_version[version])
        for version in by_version.keys() & self.times.keys():
            if by_version[version] != self.times[version]:
                _refuse_timestamps(version, self.times[version], by_version[version])


def _refuse_timestamps(version: Version, first: int, second: int) -> None:
    raise ChangelogContractViolationError(
        f"commit {version!r} has two timestamps, {moment(first)} and {moment(second)}: set one timestamp "
        "for each commit",
        condition="CHANGELOG_CONTRACT_VIOLATION.SEVERAL_TIMESTAMPS",
        version=version,
    )


class WholeCommits(Commits):
    """The commits of a stream that never splits a commit across micro-batches."""

    def __init__(self, *, allow_several_times: bool = False) -> None:
        super().__init__(allow_several_times=allow_several_times)
        self._earlier = Versions()

    def begin_batch(self, batch: int) -> None:
        """Begin a micro-batch; the commits recorded so far belong to earlier micro-batches."""
        self._earlier.add(self.times)
        self.times, self.batch = {}, batch

    def add_commits(self, commits: pa.Table) -> None:
        repeated = self._earlier.among(commits.column(0).to_pylist())
        if repeated:
            raise ChangelogContractViolationError(
                f"commit {repeated[0]!r} is in micro-batch {self.batch} and also in an earlier one, but the "
                "contract has whole_commits=True: configure the source to keep commits together "
                "(alignToAppends with a queue), or set whole_commits=False and use the watermark strategy",
                condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_IN_SEVERAL_MICRO_BATCHES",
                version=repeated[0],
                batch=self.batch,
            )
        super().add_commits(commits)


class LateCommits(Commits):
    """The commits of a stream that waits for late commits, with a watermark on commit time."""

    def __init__(
        self, delay_ms: int, initial_watermark: int = 0, *, allow_several_times: bool = False
    ) -> None:
        super().__init__(allow_several_times=allow_several_times)
        self._initial_watermark = initial_watermark
        """The watermark at the start of the run, which depends on the delays of earlier runs."""
        self._delay_ms = delay_ms
        self._newest_ms = 0
        """The time of the newest commit of earlier micro-batches, in milliseconds."""

    def begin_batch(self, batch: int) -> None:
        self.batch = batch
        self._newest_ms = max(self._newest_ms, max(self.times.values(), default=0) // 1000)
        open_from = self._newest_ms - self._delay_ms
        self.times = {version: time for version, time in self.times.items() if time // 1000 > open_from}

    def add_commits(self, commits: pa.Table) -> None:
        # Spark's watermark starts at 1970.
        watermark = max(self._newest_ms - self._delay_ms, self._initial_watermark)
        refused = np.flatnonzero(commits.column(1).to_numpy() // 1000 <= max(watermark, 0))
        if len(refused):
            version, time = (column[int(refused[0])].as_py() for column in commits.columns)
            is_late = watermark > 0
            raise self._late(version, time, watermark) if is_late else _before_1970(version, time)
        super().add_commits(commits)

    def _late(self, version: Version, time: int, watermark: int) -> ChangelogContractViolationError:
        return ChangelogContractViolationError(
            f"commit {version!r} at {moment(time)} in micro-batch {self.batch} is too late: an earlier "
            f"micro-batch had a commit at {moment(self._newest_ms * 1000)}, and the watermark is at "
            f"{moment(watermark * 1000)}. Start over with a new checkpoint and a watermark_delay longer than "
            f"{self._delay_ms} ms, so that it covers how far commits are out of order",
            condition="CHANGELOG_CONTRACT_VIOLATION.LATE_COMMIT",
            version=version,
            timestamp=moment(time),
            batch=self.batch,
        )


def _before_1970(version: Version, time: int) -> ChangelogContractViolationError:
    return ChangelogContractViolationError(
        f"commit {version!r} has the time {moment(time)}, and Spark's watermark drops rows up to "
        "1970-01-01T00:00:00Z: set the real time of each commit, or use the micro_batch strategy",
        condition="CHANGELOG_CONTRACT_VIOLATION.COMMIT_BEFORE_1970",
        version=version,
        timestamp=moment(time),
    )


def moment(micros: int) -> str:
    return moment_of(micros).isoformat()


class Versions:
    """A bounded set of versions, which drops the oldest versions when it is full."""

    def __init__(self) -> None:
        self._recent: set[Version] = set()
        self._generations: deque[NDArray[np.int64]] = deque(maxlen=GENERATIONS)

    def add(self, versions: Iterable[Version]) -> None:
        self._recent.update(versions)
        if len(self._recent) >= GENERATION:
            self._generations.append(np.sort(_numbers(self._recent)))
            self._recent = set()

    def among(self, versions: Iterable[Version]) -> list[Version]:
        """Return those of the given versions that are in the set."""
        candidates = list(versions)
        known = self._recent.intersection(candidates)
        if self._generations and candidates:
            numbers = _numbers(candidates)
            for generation in self._generations:
                indexes = np.minimum(np.searchsorted(generation, numbers), len(generation) - 1)
                known.update(candidates[index] for index in np.flatnonzero(generation[indexes] == numbers))
        return list(known)


def _numbers(versions: Iterable[Version]) -> NDArray[np.int64]:
    """Return integer versions as they are, and string versions as 64-bit hashes."""
    return np.array(
        [version if isinstance(version, int) else hash(version) for version in versions], np.int64
    )


class Journal:
    """The journal of one feed: its commits, as files in the checkpoint of a query."""

    def __init__(self, checkpoint: Checkpoint, feed: str) -> None:
        self._checkpoint = checkpoint
        self._files, root = checkpoint.files, checkpoint.root
        self._folder = f"{root}/penstock/changes/{feed}"

    def read(self) -> list[tuple[int, pa.Table]]:
        """Return the commits by micro-batch, oldest first; a compacted file has its last micro-batch."""
        files = self._names()
        compacted = max((batch for batch, is_compacted in files if is_compacted), default=-1)
        names = sorted(
            (batch, is_compacted)
            for batch, is_compacted in files
            if batch > compacted or (is_compacted and batch == compacted)
        )
        return [
            (batch, self._load(self._name(batch, is_compacted=is_compacted))) for batch, is_compacted in names
        ]

    def watermark(self, batch: int) -> int:
        """Return the watermark, in milliseconds, that Spark planned a micro-batch with; 0 if it had none."""
        name = f"offsets/{batch}"
        content = self._checkpoint.read(name)
        if content is None:
            return 0
        try:
            metadata = content.decode().split("\n")[1]
            return int(parse_json(metadata).get("batchWatermarkMs", 0)) if metadata else 0
        except (IndexError, ValueError, AttributeError, TypeError, OverflowError) as error:
            raise self._checkpoint.malformed(name, error) from error

    def write(self, batch: int, commits: pa.Table) -> None:
        """Write the commits of a micro-batch, replacing its earlier file."""
        self._save(self._name(batch, is_compacted=False), commits)

    def compact(self, before: int) -> None:
        """Compact the files of earlier micro-batches if there are COMPACT_EVERY or more."""
        earlier = [(batch, commits) for batch, commits in self.read() if batch < before]
        if len(earlier) < COMPACT_EVERY:
            return
        last = earlier[-1][0]
        compacted = pa.concat_tables(commits for _, commits in earlier)
        self._save(
            self._name(last, is_compacted=True), compacted.slice(max(0, compacted.num_rows - JOURNAL_COMMITS))
        )
        for batch, is_compacted in self._names():
            if batch < last or (batch == last and not is_compacted):
                self._files.delete_file(f"{self._folder}/{self._name(batch, is_compacted=is_compacted)}")

    def _names(self) -> list[tuple[int, bool]]:
        selector = fs.FileSelector(self._folder, allow_not_found=True)
        matches = [_NAME.fullmatch(info.base_name) for info in self._files.get_file_info(selector)]
        return [(int(match[1]), match[2] is not None) for match in matches if match is not None]

    def _name(self, batch: int, *, is_compacted: bool) -> str:
        return f"{batch}{'.all' if is_compacted else ''}.arrow"

    def _load(self, name: str) -> pa.Table:
        with self._files.open_input_stream(f"{self._folder}/{name}") as stream:
            content = stream.read(MAX_FILE_BYTES + 1)
        try:
            if len(content) > MAX_FILE_BYTES:
                raise ValueError(f"it is larger than {MAX_FILE_BYTES} bytes")
            commits = read_stored_table(content)
            if any(pat.is_null(field.type) or pat.is_nested(field.type) for field in commits.schema):
                raise ValueError("it does not have the columns of commits")
            return commits
        except ValueError as error:
            raise CommitRefusedError(
                f"the checkpoint's file {name} of a feed's commits is damaged ({error}): restore it from a "
                "copy, or start with a new checkpoint",
                condition="COMMIT_REFUSED.CHECKPOINT_DAMAGED",
                file=name,
            ) from error

    def _save(self, name: str, commits: pa.Table) -> None:
        self._files.create_dir(self._folder, recursive=True)
        # Write under another name and rename, so that a partial file is never taken for a complete one.
        draft = f"{self._folder}/.{name}.draft"
        with self._files.open_output_stream(draft) as stream:
            stream.write(ipc_stream(commits))
        self._files.move(draft, f"{self._folder}/{name}")


def refuse_watermarks(plan: object) -> None:
    """Refuse a plan with a second watermark above that of the commits, because neither would advance.

    A query has one watermark, the minimum over its watermark operators, and an operator has none before its
    first row (Spark 4.2, 4.3).
    """
    later = [] if plan is None else watermarks_above(plan, EVENT_TIME)
    if later:
        raise InvalidChangeOptionError(
            f"withWatermark on {later[-1]!r} follows the watermark strategy, and a query has one watermark: "
            "neither would advance. Use keep_watermark=True and windows of _commit_timestamp, or "
            "whole_commits=True if the source keeps commits together; or split the query with a queue",
            condition="INVALID_CDC_OPTION.SECOND_WATERMARK",
            column=later[-1],
        )


def journal_of(spark: SparkSession, query_id: str, feed: str) -> Journal | None:
    """Return the journal in a query's checkpoint; None, with a warning, if Python cannot access it."""
    try:
        return Journal(Checkpoint(running_checkpoint(spark, query_id)), feed)
    except Exception as error:
        log.warning(
            "the checkpoint of query %s cannot be accessed from Python (%s): repeated commits are detected "
            "only while this driver runs",
            query_id,
            type(error).__name__,
            extra={
                "action": "commit_tracker_without_journal",
                "query_id": query_id,
                "error": condition_of(error),
            },
        )
        return None
