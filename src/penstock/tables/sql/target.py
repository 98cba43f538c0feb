"""A table as the target of micro-batches."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.commit.micro_batch import BatchCommit, Target
from penstock.store.database import Transaction
from penstock.tables.columns import Layout
from penstock.tables.sql import apply, existing, history, upsert
from penstock.tables.sql.stage import Stage

CHANGES = "changes"
"""What is done with change rows, which come in output mode append."""

# The store's own statements walk along indexes, and its connections are told so; these read everything.
_PLANNING = "; ".join(
    f"set local enable_{what} = on" for what in ("seqscan", "bitmapscan", "hashjoin", "mergejoin")
)


@dataclass(frozen=True)
class _Table(Target[int]):
    """A SQL table, however its rows come into it."""

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
    """Staged rows are inserted, upserted, or put in the place of everything; readers see the old table or the new one."""

    mode: str
    stage: Stage

    def publish(self, tx: Transaction, batch: BatchCommit[int]) -> int:
        return self.write(tx, dict(batch.attempts))

    def write(self, tx: Transaction, attempts: dict[str, int]) -> int:
        """Make the rows of the acknowledged attempts visible, and drop everything that was staged.

        Raises
        ------
        TableRefused
            When keys clash.
        CommitRefused
            When staged rows are gone.
        """
        if tx.dialect == "postgres":
            tx.execute(_PLANNING)
        source = self.stage.take(tx, attempts)
        if self.mode == "complete":
            self._make_room(tx)
            written = upsert.replace(tx, self.layout, source)
        elif self.mode == CHANGES:
            kind = history if self.layout.history else apply
            written = kind.apply(tx, self.layout, source)
        elif self.mode == "update":
            written = upsert.upsert(tx, self.layout, source)
        else:
            written = upsert.insert(tx, self.layout, source)
        self.stage.drop(tx)
        return written

    def _make_room(self, tx: Transaction) -> None:
        """See to the table's columns, which only this mode may change."""
        there = existing.look(tx, self.layout.name)
        if there is not None and tx.dialect == "postgres":
            # Writers wait for one another, so that each replaces all that the one before has left; readers do not.
            tx.execute(f"lock table {self.layout.name.sql} in share row exclusive mode")
            there = existing.look(tx, self.layout.name)
        if there is not None and existing.differences(self.layout, there, complete=True):
            existing.drop(tx, self.layout)
            there = None
        if there is None:
            existing.create(tx, self.layout)

    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        self.stage.drop(tx)


@dataclass(frozen=True)
class WrittenTarget(_Table):
    """A table that the tasks have written for themselves."""

    def publish(self, tx: Transaction, batch: BatchCommit[int]) -> int:
        return batch.rows

    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:
        """Nothing: rows that are there were not added again."""
