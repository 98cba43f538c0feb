"""Exactly-once commits of micro-batches to an Iceberg table.

Each commit records its micro-batch in two places of the table's metadata: the table's properties, and the
snapshot's summary. Lookups use the properties. They are in the same metadata file as the snapshot, so both
are committed by one swap in the catalog, and they survive the expiration of snapshots, later commits of other
writers, and compaction. They survive a rollback too, so they name the snapshot, which must be an ancestor of
the current one. A summary is available only until its snapshot expires; it is for people, and for a table
whose properties were removed by hand.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import CommitFailedException
from pyiceberg.table import CommitTableResponse, Table
from pyiceberg.table.refs import MAIN_BRANCH
from pyiceberg.table.snapshots import ancestors_of
from pyiceberg.table.update import AssertRefSnapshotId, SetSnapshotRefUpdate

from penstock.errors import TableRefusedError
from penstock.spark.checkpoint import Checkpoint
from penstock.tables.committed import has_batch, input_digest
from penstock.tables.iceberg.rollback import is_rolled_back
from penstock.tables.names import digest

if TYPE_CHECKING:
    from pyiceberg.table.snapshots import Snapshot
    from pyiceberg.table.update import TableRequirement, TableUpdate

APP_KEY, BATCH_KEY, INPUT_KEY, ATTEMPT_KEY = (
    "penstock.app-id",
    "penstock.batch-id",
    "penstock.input",
    "penstock.attempt",
)
SNAPSHOT_KEY, SEQUENCE_NUMBER_KEY = "penstock.snapshot-id", "penstock.sequence-number"


@dataclass(frozen=True)
class CommittedBatch:
    """The last micro-batch of an app that is committed to a table."""

    batch_id: int
    input_digest: str
    attempt: str
    """The token of the attempt that committed it."""
    snapshot: tuple[int, int] | None = None
    """The id and the sequence number of the commit's snapshot, if the table's property has them."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a query, as the table's metadata identifies it."""

    app_id: str
    batch_id: int
    input_digest: str
    """A digest of the micro-batch's offsets."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, batch_id: int, app_id: str | None) -> MicroBatch:
        """Return a micro-batch in a checkpoint's offset log."""
        return cls(app_id or checkpoint.query_id(), batch_id, input_digest(checkpoint, batch_id).hex()[:32])

    @property
    def property_name(self) -> str:
        """The property with the app's last micro-batch, named by a digest, since names are not free text."""
        return f"penstock.app.{digest(self.app_id)}"

    def summary(self, attempt: str) -> dict[str, str]:
        """Return the entries for the summary of the commit's snapshot."""
        return {
            APP_KEY: self.app_id,
            BATCH_KEY: str(self.batch_id),
            INPUT_KEY: self.input_digest,
            ATTEMPT_KEY: attempt,
        }

    def properties(self, attempt: str, snapshot: Snapshot) -> dict[str, str]:
        """Return the table properties that the commit of a snapshot sets."""
        committed = {SNAPSHOT_KEY: snapshot.snapshot_id, SEQUENCE_NUMBER_KEY: snapshot.sequence_number or 0}
        return {self.property_name: json.dumps({**self.summary(attempt), **committed})}

    def refuse_rollback(self, table: Table, table_name: str) -> None:
        """Refuse a table that was rolled back to before the app's last commit, or replaced."""
        last = self._last_in_properties(table)
        if last is None or last.snapshot is None or not is_rolled_back(table.metadata, *last.snapshot):
            return
        raise TableRefusedError(
            f"the Iceberg table {table_name} was rolled back or replaced, and lacks the rows of micro-batch "
            f"{last.batch_id} of app {self.app_id!r}. They are not written again: go back to snapshot "
            f"{last.snapshot[0]}, or start over with a new checkpoint, after dropping the table if changes "
            "are applied to it",
            condition="TABLE_REFUSED.ROLLED_BACK",
            table=table_name,
            snapshot=last.snapshot[0],
        )

    def committed(self, table: Table) -> CommittedBatch | None:
        """Return the commit of the micro-batch if the table has it."""
        last = self._last_committed(table)
        last_batch = (None, None) if last is None else (last.batch_id, last.input_digest)
        is_committed = has_batch(
            "the Iceberg table", self.app_id, self.batch_id, self.input_digest, *last_batch
        )
        return last if is_committed else None

    def _last_committed(self, table: Table) -> CommittedBatch | None:
        """Return the last micro-batch of the app in the table."""
        candidates = [
            candidate
            for candidate in (self._last_in_properties(table), self._last_in_snapshots(table))
            if candidate is not None
        ]
        return max(candidates, key=lambda candidate: candidate.batch_id, default=None)

    def _last_in_properties(self, table: Table) -> CommittedBatch | None:
        text = table.properties.get(self.property_name)
        if text is None:
            return None
        try:
            value = json.loads(text)
            snapshot = (
                (int(value[SNAPSHOT_KEY]), int(value[SEQUENCE_NUMBER_KEY])) if SNAPSHOT_KEY in value else None
            )
            return CommittedBatch(
                int(value[BATCH_KEY]), str(value[INPUT_KEY]), str(value[ATTEMPT_KEY]), snapshot
            )
        except (ValueError, KeyError, TypeError):
            raise TableRefusedError(
                f"the property {self.property_name} of the Iceberg table {'.'.join(table.name())} does not "
                f"say which micro-batch of app {self.app_id!r} it has last: restore the property, or use a "
                "new app_id with a new checkpoint",
                condition="TABLE_REFUSED.APP_PROPERTY",
                property=self.property_name,
            ) from None

    def _last_in_snapshots(self, table: Table) -> CommittedBatch | None:
        for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
            summary = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            if summary.get(APP_KEY) == self.app_id and {BATCH_KEY, INPUT_KEY, ATTEMPT_KEY} <= summary.keys():
                return CommittedBatch(int(summary[BATCH_KEY]), summary[INPUT_KEY], summary[ATTEMPT_KEY])
        return None


class CommitConflict(Exception):
    """Another writer committed first."""


def disable_commit_retries(table: Table) -> None:
    """Disable pyiceberg's commit retries for a loaded table."""
    table.catalog = cast("Catalog", SingleAttemptCatalog(table.catalog))


class SingleAttemptCatalog:
    """Catalog wrapper that attempts each commit only once.

    After a conflict, pyiceberg retries a commit on the changed table, although the other commit may be the
    same micro-batch from another run. It also deletes the manifests of a commit that it considers failed,
    although the catalog may have applied it, since a repeated request is answered with a conflict too.

    For a commit to several branches, pyiceberg only requires that one of them is unchanged. Here, the commit
    conflicts if any of them has changed since it was loaded.
    """

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog

    def __getattr__(self, name: str) -> Any:
        return getattr(self._catalog, name)

    def commit_table(
        self, table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
    ) -> CommitTableResponse:
        try:
            return self._catalog.commit_table(
                table, _require_all_branches(table, requirements, updates), updates
            )
        except CommitFailedException as error:
            raise CommitConflict(str(error)) from error


def _require_all_branches(
    table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
) -> tuple[TableRequirement, ...]:
    refs = table.metadata.refs
    names = {update.ref_name for update in updates if isinstance(update, SetSnapshotRefUpdate)}
    other_requirements = [
        requirement for requirement in requirements if not isinstance(requirement, AssertRefSnapshotId)
    ]
    branches = [
        AssertRefSnapshotId.model_validate(
            {"ref": name, "snapshot-id": refs[name].snapshot_id if name in refs else None}
        )
        for name in sorted(names)
        # A table without snapshots has no branches, and pyiceberg accepts only the main one.
        if table.metadata.snapshots or name == MAIN_BRANCH
    ]
    return (*other_requirements, *branches)
