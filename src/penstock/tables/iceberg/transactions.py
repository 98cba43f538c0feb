"""What makes a micro-batch's commit to an Iceberg table happen once.

Each commit writes which micro-batch it has into two places of the table's metadata: the properties of the
table, and the summary of the snapshot. The table's properties are what is looked up. They are in the same
metadata file as the snapshot, so both are committed by one swap in the catalog, and they stay when snapshots
expire, when other writers have committed since, and when rows are compacted. A summary is found only while
its snapshot is kept: it is for people, and for a table whose properties were removed by hand.
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
from penstock.tables.names import digest

if TYPE_CHECKING:
    from pyiceberg.table.update import TableRequirement, TableUpdate

APP, BATCH, INPUT, ATTEMPT = "penstock.app-id", "penstock.batch-id", "penstock.input", "penstock.attempt"


@dataclass(frozen=True)
class Committed:
    """A micro-batch that a table has."""

    batch_id: int
    input: str
    attempt: str
    """The token of the attempt that committed it."""


@dataclass(frozen=True)
class MicroBatch:
    """A micro-batch of a query, as the table's metadata names it."""

    app_id: str
    batch_id: int
    input: str
    """A digest of its offsets."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, batch_id: int, app_id: str | None) -> MicroBatch:
        """Return a micro-batch in a checkpoint's offset log."""
        return cls(app_id or checkpoint.query_id(), batch_id, input_digest(checkpoint, batch_id).hex()[:32])

    @property
    def property_name(self) -> str:
        """The table's property with the last micro-batch of the app; a name takes no text of any form."""
        return f"penstock.app.{digest(self.app_id)}"

    def summary(self, attempt: str) -> dict[str, str]:
        """Return what the summary of the commit's snapshot says."""
        return {APP: self.app_id, BATCH: str(self.batch_id), INPUT: self.input, ATTEMPT: attempt}

    def properties(self, attempt: str) -> dict[str, str]:
        """Return the table's properties of the commit."""
        return {self.property_name: json.dumps(self.summary(attempt))}

    def committed(self, table: Table) -> Committed | None:
        """Return the commit of the micro-batch if the table has it."""
        last = self._last(table)
        newest = (None, None) if last is None else (last.batch_id, last.input)
        found = has_batch("the Iceberg table", self.app_id, self.batch_id, self.input, *newest)
        return last if found else None

    def _last(self, table: Table) -> Committed | None:
        """Return the app's last micro-batch that the table has."""
        found = [each for each in (self._in_properties(table), self._in_snapshots(table)) if each is not None]
        return max(found, key=lambda each: each.batch_id, default=None)

    def _in_properties(self, table: Table) -> Committed | None:
        text = table.properties.get(self.property_name)
        if text is None:
            return None
        try:
            value = json.loads(text)
            return Committed(int(value[BATCH]), str(value[INPUT]), str(value[ATTEMPT]))
        except (ValueError, KeyError, TypeError):
            raise TableRefusedError(
                f"the property {self.property_name} of the Iceberg table {'.'.join(table.name())} does not "
                f"say which micro-batch of app {self.app_id!r} it has last: restore the property, or use a "
                "new app_id with a new checkpoint",
                condition="TABLE_REFUSED.APP_PROPERTY",
                property=self.property_name,
            ) from None

    def _in_snapshots(self, table: Table) -> Committed | None:
        for snapshot in ancestors_of(table.current_snapshot(), table.metadata):
            summary = snapshot.summary.additional_properties if snapshot.summary is not None else {}
            if summary.get(APP) == self.app_id and {BATCH, INPUT, ATTEMPT} <= summary.keys():
                return Committed(int(summary[BATCH]), summary[INPUT], summary[ATTEMPT])
        return None


class CommitConflict(Exception):
    """Another writer was faster."""


def commit_once(table: Table) -> None:
    """Have each commit of a loaded table made once."""
    table.catalog = cast("Catalog", OneTry(table.catalog))


class OneTry:
    """A catalog that makes each commit once.

    pyiceberg repeats a commit that conflicts with another one on the changed table. That commit may be the
    same micro-batch of another run. It also deletes the manifests of a commit that it takes for failed, but
    the catalog may have applied it: the answer to a repeated request is a conflict too.

    Of a commit to several branches, pyiceberg requires only of one of them that it has not changed. Here all
    of them are as they were loaded, or the commit conflicts.
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
                table, _with_all_branches(table, requirements, updates), updates
            )
        except CommitFailedException as error:
            raise CommitConflict(str(error)) from error


def _with_all_branches(
    table: Table, requirements: tuple[TableRequirement, ...], updates: tuple[TableUpdate, ...]
) -> tuple[TableRequirement, ...]:
    refs = table.metadata.refs
    names = {update.ref_name for update in updates if isinstance(update, SetSnapshotRefUpdate)}
    others = [each for each in requirements if not isinstance(each, AssertRefSnapshotId)]
    branches = [
        AssertRefSnapshotId.model_validate(
            {"ref": name, "snapshot-id": refs[name].snapshot_id if name in refs else None}
        )
        for name in sorted(names)
        # Without any snapshot there is no branch, and pyiceberg lets only the main one be named.
        if table.metadata.snapshots or name == MAIN_BRANCH
    ]
    return (*others, *branches)
