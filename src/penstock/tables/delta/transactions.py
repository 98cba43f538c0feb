"""Merges of rows into a Delta table."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from penstock.errors import CheckpointMismatch, CheckpointRewound
from penstock.lake.delta_location import library
from penstock.spark.checkpoint import Checkpoint
from penstock.tables.names import quoted

TARGET, SOURCE = "target", "source"


def merging(table: Any, rows: pa.RecordBatchReader | pa.Table, keys: Iterable[str], properties: Any) -> Any:
    """A merge that finds rows by keys, deltalake's ``TableMerger``, which is told next what to do with them."""
    same = " and ".join(f"{TARGET}.{quoted(key)} = {SOURCE}.{quoted(key)}" for key in keys)
    return table.merge(rows, same, source_alias=SOURCE, target_alias=TARGET, commit_properties=properties)


def assigned(names: Iterable[str]) -> dict[str, str]:
    """The columns that take the values of the source."""
    return {quoted(name): f"{SOURCE}.{quoted(name)}" for name in names}


# ---- delta_transactions: Delta's app transactions, which take the ledger's place: a commit carries the query's id and the micro-batch's number.


def properties(versions: Mapping[str, int]) -> Any:
    """What makes a commit carry versions of app transactions, deltalake's ``CommitProperties``; None for none of them."""
    if not versions:
        return None
    deltalake = library("deltalake")
    transactions = [deltalake.Transaction(*each) for each in versions.items()]
    return deltalake.CommitProperties(app_transactions=transactions)


@dataclass(frozen=True)
class AppTransaction:
    """A micro-batch as the table's log knows it."""

    app_id: str
    batch_id: int
    input: int
    """A digest of what it covers of its sources: a version is all that a transaction can carry."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, batch_id: int, app_id: str | None) -> AppTransaction:
        """The transaction of a micro-batch that a checkpoint has in its offset log."""
        query_id = checkpoint.query_id()
        text = json.dumps([query_id, checkpoint.offsets(batch_id)], sort_keys=True)
        digest = hashlib.sha256(text.encode()).digest()
        # Versions are whole numbers of 64 bits with a sign.
        return cls(app_id or query_id, batch_id, int.from_bytes(digest[:8], "big") >> 1)

    @property
    def _names(self) -> tuple[str, str]:
        return f"penstock:{self.app_id}", f"penstock-input:{self.app_id}"

    @property
    def versions(self) -> dict[str, int]:
        """What a commit of the micro-batch carries."""
        return dict(zip(self._names, (self.batch_id, self.input), strict=True))

    def committed(self, table: Any) -> bool:
        """Whether the table has the micro-batch already.

        Raises
        ------
        CheckpointRewound
            When it has later ones of the app.
        CheckpointMismatch
            When it has the micro-batch with other input.
        """
        last, last_input = (table.transaction_version(name) for name in self._names)
        if last is None or last < self.batch_id:
            return False
        if last > self.batch_id:
            raise CheckpointRewound(
                f"app {self.app_id!r} is at micro-batch {last} in the Delta table and its checkpoint at {self.batch_id}: another "
                "process runs the same query at this moment, which then is to go on alone; or the checkpoint is an old copy, or a new one under "
                "the app_id of another. Use the newest checkpoint; a new one needs a new app_id (leave it out to get one)",
                app_id=self.app_id,
                batch_id=self.batch_id,
                last=last,
            )
        if last_input != self.input:
            raise CheckpointMismatch(
                f"app {self.app_id!r} has committed micro-batch {self.batch_id} into the Delta table before, with other input: the "
                "checkpoint is an old copy, or a new one under the app_id of another. Use the newest checkpoint; a new one needs a new "
                "app_id (leave it out to get one)",
                app_id=self.app_id,
                batch_id=self.batch_id,
            )
        return True
