"""``ExportRun``: a run of an export, which commits rows to the table."""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass

import pyarrow as pa

from penstock.errors import CommitRefusedError, DataLostError, PenstockError, condition_of
from penstock.export.source import ExportSource, Pending, Plan
from penstock.export.table import ExportTable, QueueId, TableChangedError, known_positions
from penstock.redaction import redacted_message
from penstock.store.database import OwnerLock

log = logging.getLogger("penstock.export")

_COMMIT_FILES = 4
"""The maximum number of files of the target size in a commit, which limits the work lost by a crash."""
_ATTEMPTS = 10


@dataclass
class Totals:
    commits: int = 0
    rows: int = 0


class ExportRun:
    """A run of an export, which holds the export's lock until it is closed."""

    def __init__(
        self,
        source: ExportSource,
        table: ExportTable,
        queue: QueueId,
        file_bytes: int,
        lock: OwnerLock,
        totals: Totals,
    ) -> None:
        self._source, self._table, self._queue = source, table, queue
        self._file_bytes = file_bytes
        self._lock, self._totals = lock, totals
        self._prepared: pa.Schema | None = None
        self.positions: dict[int, int] = {}
        """The index of the first row that the table lacks in each partition, as of the last commit."""
        self._prepare()

    def close(self) -> None:
        self._lock.release()

    def ends(self) -> dict[int, int]:
        """Return the current end of each partition."""
        return self._source.ends()

    def has_full_file(self) -> bool:
        """Return whether there are enough new rows for a file."""
        return self._source.pending(lambda count: self.positions).bytes >= self._file_bytes

    def commit(self, until: Mapping[int, int] | None = None) -> bool:
        """Commit rows that the table lacks; return False if it lacks none.

        ``until`` limits each partition; by default its current end.
        """
        last_error: Exception | None = None
        for attempt in range(_ATTEMPTS):
            time.sleep(random.uniform(0, 0.05 * attempt))
            try:
                pending = self._read_pending(until)
                if self._prepare():
                    # The preparation committed a new version of the table.
                    continue
                plan = self._source.plan(pending, _COMMIT_FILES * self._file_bytes)
                if not plan.rows:
                    self._source.follow(pending.starts, allow_backward=True)
                    return False
                self._append(plan, pending, until)
            except TableChangedError as error:
                last_error = error
            else:
                self._record_commit(plan, {**pending.starts, **plan.ends})
                return True
        raise CommitRefusedError(
            f"other writers changed {self._table.label} during all {_ATTEMPTS} attempts to commit "
            f"({last_error}). No row of the last attempt is visible: start the export again",
            condition="COMMIT_REFUSED.TABLE_CHANGED",
            table=self._table.label,
        )

    def _append(self, plan: Plan, pending: Pending, until: Mapping[int, int] | None) -> None:
        try:
            self._table.append(
                self._source.schema, self._source.rows(plan), {**pending.unrecorded, **plan.ends}
            )
        except DataLostError:
            # The rows may have been trimmed after another process exported them.
            if self._read_pending(until).starts == pending.starts:
                raise
            raise TableChangedError("another process has exported the rows") from None

    def _record_commit(self, plan: Plan, positions: dict[int, int]) -> None:
        self.positions = positions
        self._totals.commits += 1
        self._totals.rows += plan.rows
        log.debug(
            "rows of queue %r are in %s",
            plan.record.name,
            self._table.label,
            extra={"action": "rows_exported", "queue": plan.record.name, "rows": plan.rows},
        )
        self._source.follow(positions)
        try:
            self._table.compact_small_files()
        except PenstockError as error:
            # The rows are committed, and compaction is tried again after a later commit.
            log.warning(
                "the small files of %s were not compacted: %s. A later commit tries again",
                self._table.label,
                redacted_message(error),
                extra={
                    "action": "files_not_merged",
                    "table": self._table.label,
                    "error": condition_of(error),
                },
            )

    def _read_pending(self, until: Mapping[int, int] | None) -> Pending:
        if not self._table.load():
            # The table was deleted.
            self._prepared = None
            self._prepare()
            self._table.load()
        pending = self._source.pending(
            lambda partitions: known_positions(self._table, self._queue, partitions), until
        )
        self.positions = dict(pending.starts)
        return pending

    def _prepare(self) -> bool:
        """Prepare the table if its columns or the queue's have changed; return whether they have."""
        schema = self._source.schema
        if (
            self._prepared is not None
            and self._prepared.equals(schema)
            and not self._table.lacks_columns(schema)
        ):
            return False
        self._table.prepare(schema)
        self._prepared = schema
        return True
