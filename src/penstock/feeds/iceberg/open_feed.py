"""An open Iceberg feed: its catalog, the table's metadata, and translation of pyiceberg's errors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import pyarrow as pa
from pyiceberg.avro.file import AvroFile
from pyiceberg.catalog import Catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from penstock.arrow.schema import canonical_schema
from penstock.errors import DataLostError, FeedUnavailableError, PenstockError
from penstock.feeds.contract import ChangeContract
from penstock.feeds.file_commits import Planned
from penstock.feeds.iceberg import scan
from penstock.feeds.iceberg.feed import IcebergFeed
from penstock.feeds.iceberg.history import History, Manifest
from penstock.feeds.iceberg.planning import Planner
from penstock.feeds.iceberg.scan import ReadTask, TableView
from penstock.feeds.protocol import (
    METADATA_FIELDS,
    Commit,
    Description,
    OpenFeed,
    check_columns_exist,
    check_reserved,
    has_no_key,
)
from penstock.lake.catalogs import client_secrets, open_catalog, storage_secrets, task_io
from penstock.lake.storage import access_denied, is_denied, without_secrets


@dataclass(frozen=True)
class PlannedTable:
    """The table at the time of ``describe()``."""

    schema: Schema
    has_lineage: bool
    version: int


class OpenIcebergFeed(OpenFeed):
    """An Iceberg table that is open in one process; reads keep the schema of ``describe()``."""

    beginning = 0

    def __init__(self, feed: IcebergFeed) -> None:
        self.name, self._feed = feed.name, feed
        self._catalog: Catalog | None = None
        self._table: Table | None = None
        self._planned: PlannedTable | None = None
        self._history: History | None = None
        self._logged_version: int | None = None
        """The version up to which Spark has logged the stream's commits."""
        self._had_parents: dict[int, bool] = {}

    def describe(self, after: int | None = None) -> Description:
        """Describe the current table, even if it was recreated."""
        self._table = self._planned = None
        self._load()
        table = self._planned_table()
        with self._translating("its schema cannot be read"):
            data = canonical_schema(schema_to_pyarrow(table.schema, include_field_ids=False))
        by_lineage = self._by_lineage()
        check_reserved(data.names, self.name, scan.NAMES if by_lineage else ())
        identifiers = () if by_lineage else sorted(table.schema.identifier_field_names())
        contract = ChangeContract(
            row_id=scan.ROW_ID if by_lineage else self._row_id_columns(data, identifiers),
            row_version=scan.UPDATED if by_lineage else None,
            nullable_row_id=not self._has_key(data, identifiers),
            carryover_rows=True,
            updates_as_delete_and_insert=True,
            intermediate_changes=True,
            whole_commits=True,
        )
        columns = [*data, *(scan.FIELDS if by_lineage else ()), *METADATA_FIELDS]
        planned = Planned(table.version, len(table.schema.fields))
        # A renamed table keeps its UUID.
        identity = f"iceberg:{self._current().metadata.table_uuid}"
        return Description(identity, pa.schema(columns), contract, planned.to_json())

    def oldest(self) -> int:
        history = self._refreshed_history()
        return history.oldest_with_lineage if self._by_lineage() else history.oldest

    def newest(self, after: int) -> int:
        return self._refreshed_history().newest(after, self._logged_version)

    def commits(self, after: int, upto: int, rows: int | None = None) -> Iterator[Commit]:
        for snapshot in self._history_upto(upto).between(after, upto, self._logged_version):
            yield Commit(snapshot.version, snapshot.timestamp, snapshot.rows)

    def tasks(self, after: int, upto: int, rows_per_task: int) -> Sequence[ReadTask]:
        snapshots = list(self._history_upto(upto).between(after, upto, self._logged_version))
        table = self._current()
        view = TableView(
            self.name,
            task_io(table.io),
            self._planned_table().schema,
            table.metadata.name_mapping(),
            table.metadata.format_version,
            self._by_lineage(),
        )
        with self._translating("its manifests cannot be read", missing=DataLostError):
            return Planner(self.name, table, view, rows_per_task).tasks(snapshots)

    def read(self, task: ReadTask, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
        return scan.rows(task, schema)

    def commit_name(self, version: int) -> str | None:
        snapshot = self._history_upto(version).chain.get(version)
        return None if snapshot is None else str(snapshot.snapshot_id)

    def logged(self, upto: int) -> None:
        """Record the logged version: a history without it is another history. Nothing has to be released."""
        self._logged_version = upto

    def _by_lineage(self) -> bool:
        """Whether rows are identified by row lineage; this does not change while a query runs."""
        return self._planned_table().has_lineage and self._feed.row_id in (None, (scan.ROW_ID,))

    def _has_key(self, data: pa.Schema, identifiers: Sequence[str]) -> bool:
        """Whether rows are identified by row lineage or by some of the columns."""
        if self._feed.row_id is None or self._by_lineage():
            return self._by_lineage() or bool(identifiers)
        return not has_no_key(self._feed.row_id, data)

    def _row_id_columns(self, data: pa.Schema, identifiers: Sequence[str]) -> Sequence[str]:
        check_columns_exist(data, self.name, self._feed.row_id or ())
        groupable = [_quoted(column.name) for column in data if not _has_map(column.type)]
        columns = self._feed.row_id or identifiers or groupable
        if not columns:
            raise FeedUnavailableError(
                f"{self.name} has only map columns, which cannot identify rows: add a column of another type",
                condition="FEED_UNAVAILABLE.NO_ROW_ID",
            )
        return columns

    def _refreshed_history(self) -> History:
        self._load()
        return self._cached_history()

    def _history_upto(self, upto: int) -> History:
        """Return a history that includes a version, from the cache if possible."""
        history = self._history
        return self._refreshed_history() if history is None or history.last < upto else history

    def _cached_history(self) -> History:
        if self._history is None:
            self._history = History.of(self.name, self._current().metadata, self._had_parent)
        return self._history

    def _planned_table(self) -> PlannedTable:
        if self._planned is None:
            table = self._current()
            has_lineage = table.metadata.format_version >= scan.FORMAT_VERSION
            self._planned = PlannedTable(table.schema(), has_lineage, self._cached_history().last)
        return self._planned

    def _had_parent(self, snapshot: Snapshot) -> bool:
        if snapshot.snapshot_id not in self._had_parents:
            file = self._current().io.new_input(snapshot.manifest_list)
            with self._translating("its manifest list cannot be read"), AvroFile[Manifest](file) as manifests:
                parent = manifests.header.meta.get("parent-snapshot-id")
                self._had_parents[snapshot.snapshot_id] = parent != "null"
        return self._had_parents[snapshot.snapshot_id]

    def _current(self) -> Table:
        return self._table if self._table is not None else self._load()

    def _load(self) -> Table:
        with self._translating("the catalog does not answer"):
            if self._catalog is None:
                # Do not create catalog tables in a database, in case its address is wrong.
                properties = {"init_catalog_tables": "false", **self._feed.properties}
                self._catalog = open_catalog(self._feed.catalog, properties)
            table = self._catalog.load_table(self._feed.table)
        self._check(table)
        self._table, self._history = table, None
        return table

    def _check(self, table: Table) -> None:
        if self._table is not None and table.metadata.table_uuid != self._table.metadata.table_uuid:
            raise DataLostError(
                f"{self.name} was recreated while the query was running: start over with a new checkpoint",
                condition="DATA_LOST.HISTORY_CHANGED",
            )
        if table.metadata.format_version < 2:
            raise FeedUnavailableError(
                f"{self.name} has format 1, whose snapshots have no sequence numbers: upgrade it, for "
                "example with table.transaction().upgrade_table_version(2).commit_transaction()",
                condition="FEED_UNAVAILABLE.FORMAT_VERSION",
                found=table.metadata.format_version,
            )

    @property
    def _secrets(self) -> Sequence[Mapping[str, object]]:
        """Properties whose values must not appear in messages."""
        catalog = {} if self._catalog is None else client_secrets(self._catalog)
        return [self._feed.properties, catalog, {} if self._table is None else storage_secrets(self._table)]

    @contextmanager
    def _translating(self, what: str, missing: type[PenstockError] = FeedUnavailableError) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except (NoSuchTableError, NoSuchNamespaceError):
            raise FeedUnavailableError(
                f"there is no {self.name} in the catalog {self._feed.catalog!r}: give its name with the "
                "namespace, as in namespace.table",
                condition="FEED_UNAVAILABLE.TABLE_NOT_FOUND",
                table=self._feed.table,
                catalog=self._feed.catalog,
            ) from None
        except FileNotFoundError as error:
            raise missing(
                f"{self.name}: {what}, a file is missing: {without_secrets(error, *self._secrets)}",
                condition="DATA_LOST.FILE_MISSING"
                if missing is DataLostError
                else "FEED_UNAVAILABLE.CATALOG",
            ) from None
        except Exception as error:  # Catalogs raise errors of many libraries.
            reason = f"{what}: {without_secrets(error, *self._secrets)}"
            if is_denied(error):
                raise access_denied(self.name, reason, "the catalog's properties") from None
            raise FeedUnavailableError(
                f"{self.name}: {reason}. Check the properties of the catalog {self._feed.catalog!r} "
                f"({', '.join(sorted(self._feed.properties)) or 'none given'})",
                condition="FEED_UNAVAILABLE.CATALOG",
                catalog=self._feed.catalog,
            ) from None


def _quoted(name: str) -> str:
    return f"`{name}`" if "." in name and "`" not in name else name


def _has_map(kind: pa.DataType) -> bool:
    if pa.types.is_map(kind):
        return True
    return any(_has_map(kind.field(index).type) for index in range(kind.num_fields))
