"""SQL tables as targets of commits: what the transaction of a micro-batch does to the table."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.commit.micro_batch import BatchCommit, Target
from penstock.store.database import Transaction
from penstock.tables.columns import Layout
from penstock.tables.sql import ddl, upsert
from penstock.tables.sql.apply import apply_changes
from penstock.tables.sql.staging import Stage

CHANGES = "changes"
"""The write mode of change rows, whose output mode is append."""

# The store's connections disable these plans, since its own statements walk along indexes; a table's
# statements read all rows.
_ALL_PLANS = "; ".join(
    f"set local enable_{what} = on" for what in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")
)


@dataclass(frozen=True)
class _Table(Target[int]):
    """A SQL table as the target of a commit."""

    layout: Layout
    called: str
    """The table's name as the user wrote it."""

    @property
    def name(self) -> str:
        return self.called

    @property
    def ledger_name(self) -> str:
        return self.layout.name.ledger_name

    def __str__(self) -> str:
        return f"table {self.called!r}"


@dataclass(frozen=True)
class TableTarget(_Table):
    """A table whose staged rows are inserted, upserted, applied, or replace all others, in one
    transaction.
    """

    mode: str
    stage: Stage

    def publish(self, tx: Transaction, batch: BatchCommit[int]) -> int:
        return self.write(tx, dict(batch.attempts))

    def write(self, tx: Transaction, attempts: dict[str, int]) -> int:
        """Make the rows of the acknowledged attempts visible, and drop everything that was staged.

        Raises
        ------
        TableRefusedError
            When keys clash.
        CommitRefusedError
            When staged rows are gone.
        """
        if tx.dialect == "postgres":
            tx.execute(_ALL_PLANS)
        source = self.stage.take(tx, attempts)
        if self.mode == "complete":
            self._recreate_when_changed(tx)
            written = upsert.replace(tx, self.layout, source)
        elif self.mode == CHANGES:
            written = apply_changes(tx, self.layout, source)
        elif self.mode == "update":
            written = upsert.upsert(tx, self.layout, source)
        else:
            written = upsert.insert(tx, self.layout, source)
        self.stage.drop(tx)
        return written

    def _recreate_when_changed(self, tx: Transaction) -> None:
        """Create the table, or recreate it when the rows have other columns, as only output mode complete
        may.
        """
        existing = ddl.find_table(tx, self.layout.name)
        if existing is not None and tx.dialect == "postgres":
            # Serialises writers, so that each replaces all rows of the one before; readers do not wait.
            tx.execute(f"lock table {self.layout.name.sql} in share row exclusive mode")
            existing = ddl.find_table(tx, self.layout.name)
        if existing is not None and ddl.differences(self.layout, existing, complete=True):
            ddl.drop_table(tx, self.layout)
            existing = None
        if existing is None:
            ddl.create_table(tx, self.layout)

    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        self.stage.drop(tx)


@dataclass(frozen=True)
class WrittenTarget(_Table):
    """A table that the tasks have written themselves, with idempotent inserts."""

    def publish(self, tx: Transaction, batch: BatchCommit[int]) -> int:
        return batch.rows

    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        """Do nothing: repeated rows were skipped when they were inserted."""
