"""Commits to a Delta table: merges, and the app transactions that make them exactly-once.

A commit carries the query's id and the micro-batch's number.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pyarrow as pa

from penstock.lake.storage import DeltaLocation, import_deltalake
from penstock.spark.checkpoint import Checkpoint
from penstock.tables.committed import has_batch, input_digest
from penstock.tables.names import quoted

if TYPE_CHECKING:
    from deltalake import CommitProperties, DeltaTable
    from deltalake.table import TableMerger

TARGET, SOURCE = "target", "source"


def merge_by_keys(
    table: DeltaTable,
    rows: pa.RecordBatchReader | pa.Table,
    keys: Iterable[str],
    properties: CommitProperties | None,
) -> TableMerger:
    """Return deltalake's ``TableMerger``, which matches rows by the keys."""
    condition = " and ".join(f"{TARGET}.{quoted(key)} = {SOURCE}.{quoted(key)}" for key in keys)
    return table.merge(
        rows, condition, source_alias=SOURCE, target_alias=TARGET, commit_properties=properties
    )


def source_columns(names: Iterable[str]) -> dict[str, str]:
    """Return the assignments of a merge that set the named columns to the source's values."""
    return {quoted(name): f"{SOURCE}.{quoted(name)}" for name in names}


def commit_properties(versions: Mapping[str, int], *, as_loaded: bool = False) -> CommitProperties | None:
    """Return deltalake's ``CommitProperties`` with versions of app transactions; None without any.

    With ``as_loaded``, any change of the table since it was loaded is a conflict.
    """
    if not versions and not as_loaded:
        return None
    deltalake = import_deltalake("deltalake")
    transactions = [deltalake.Transaction(*version) for version in versions.items()]
    properties: CommitProperties = deltalake.CommitProperties(
        max_commit_retries=0 if as_loaded else None, app_transactions=transactions or None
    )
    return properties


@contextmanager
def committing(location: DeltaLocation) -> Iterator[None]:
    """Translate deltalake's errors, except the conflict after which a commit is retried."""
    with location.translating_errors(
        untranslated=(import_deltalake("deltalake.exceptions").CommitFailedError,)
    ):
        yield


@dataclass(frozen=True)
class AppTransaction:
    """The app transaction of a micro-batch in a Delta table's log."""

    app_id: str
    batch_id: int
    batch_input: int
    """A digest of the micro-batch's offsets, as an integer, since a transaction only carries a version."""

    @classmethod
    def of(cls, checkpoint: Checkpoint, batch_id: int, app_id: str | None) -> AppTransaction:
        """Return the transaction of a micro-batch in a checkpoint's offset log."""
        digest = input_digest(checkpoint, batch_id)
        # Versions are signed 64-bit integers.
        return cls(app_id or checkpoint.query_id(), batch_id, int.from_bytes(digest[:8], "big") >> 1)

    @property
    def _names(self) -> tuple[str, str]:
        return f"penstock:{self.app_id}", f"penstock-input:{self.app_id}"

    @property
    def name(self) -> str:
        """The app transaction whose version is the number of the micro-batch."""
        return self._names[0]

    @property
    def versions(self) -> dict[str, int]:
        """The app transactions of the micro-batch's commit."""
        return dict(zip(self._names, (self.batch_id, self.batch_input), strict=True))

    def is_committed(self, location: DeltaLocation, table: DeltaTable) -> bool:
        """Return whether a loaded table already has the micro-batch."""
        last, last_input = (location.app_version(table, name) for name in self._names)
        return has_batch("the Delta table", self.app_id, self.batch_id, self.batch_input, last, last_input)
