"""A table as this process sees it: its metadata, refreshed when asked for, and the errors of its libraries in plain words."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyiceberg.avro.file import AvroFile
from pyiceberg.catalog import Catalog, load_catalog
from pyiceberg.exceptions import NoSuchNamespaceError, NoSuchTableError
from pyiceberg.io.pyarrow import schema_to_pyarrow
from pyiceberg.schema import Schema
from pyiceberg.table import Table
from pyiceberg.table.snapshots import Snapshot

from penstock.errors import DataLost, FeedUnavailable, PenstockError
from penstock.feeds.iceberg import scan
from penstock.feeds.iceberg.history import History
from penstock.feeds.iceberg.planning import Planner
from penstock.feeds.iceberg.scan import ReadTask, TableView
from penstock.feeds.planned_schema import Planned
from penstock.lake.errors import access_denied, is_denied, without_secrets


class Opened:
    """One process's hold of a table."""

    def __init__(self, name: str, table: str, catalog: str, properties: Mapping[str, str]) -> None:
        self.logged: int | None = None
        """The version up to which Spark has logged the stream's commits."""
        self._name, self._identifier = name, table
        self._catalog_name, self._properties = catalog, properties
        self._catalog: Catalog | None = None
        self._table: Table | None = None
        self._schema: Schema | None = None
        self._lineage = False
        self._version = 0
        self._history: History | None = None
        self._parents: dict[int, bool] = {}

    def describe_anew(self) -> None:
        """Take the table as it is now for the one that a query is planned with, another one of its name included."""
        self._table = self._schema = None
        self._load()
        self._described()

    def planned(self) -> Planned:
        """What a query knows of the table that is planned with it as it was described."""
        return Planned(self._version, len(self._described().fields))

    def uuid(self) -> str:
        """The identity that a table keeps when it is renamed."""
        return str(self._current().metadata.table_uuid)

    def arrow_schema(self) -> pa.Schema:
        """The columns; the same ones for as long as a query runs."""
        with self._plainly("its schema cannot be read"):
            return schema_to_pyarrow(self._described(), include_field_ids=False)

    def identifier_columns(self) -> Sequence[str]:
        """The names of the identifier fields."""
        return sorted(self._described().identifier_field_names())

    def has_lineage(self) -> bool:
        """Whether the table gives its rows numbers; the same answer for as long as a query runs."""
        self._described()
        return self._lineage

    def refreshed(self) -> History:
        """The history as it is now."""
        self._load()
        return self._known()

    def history(self, upto: int) -> History:
        """A history that reaches as far as a version, from memory if that does."""
        if self._history is None or self._history.last < upto:
            return self.refreshed()
        self._history.logged = self.logged
        return self._history

    def tasks(self, after: int, upto: int, rows_per_task: int, *, by_lineage: bool) -> Sequence[ReadTask]:
        """A range in pieces."""
        snapshots = list(self.history(upto).between(after, upto))
        table = self._current()
        view = TableView(
            self._name,
            table.io,
            self._described(),
            table.metadata.name_mapping(),
            table.metadata.format_version,
            by_lineage,
        )
        with self._plainly("its manifests cannot be read", missing=DataLost):
            planner = Planner(self._name, table, view, rows_per_task)
            return planner.tasks(snapshots)

    def _described(self) -> Schema:
        if self._schema is None:
            table = self._current()
            self._schema = table.schema()
            self._lineage = table.metadata.format_version >= scan.FORMAT_VERSION
            self._version = self._known().last
        return self._schema

    def _known(self) -> History:
        if self._history is None:
            self._history = History.of(self._name, self._current().metadata, self._had_parent)
        self._history.logged = self.logged
        return self._history

    def _had_parent(self, snapshot: Snapshot) -> bool:
        if snapshot.snapshot_id not in self._parents:
            file = self._current().io.new_input(snapshot.manifest_list)
            with self._plainly("its manifest list cannot be read"), AvroFile[Any](file) as manifests:
                self._parents[snapshot.snapshot_id] = (
                    manifests.header.meta.get("parent-snapshot-id") != "null"
                )
        return self._parents[snapshot.snapshot_id]

    def _current(self) -> Table:
        return self._table if self._table is not None else self._load()

    def _load(self) -> Table:
        with self._plainly("the catalog does not answer"):
            if self._catalog is None:
                # A reader makes no tables in a database whose address was mistyped.
                given = {"init_catalog_tables": "false", **self._properties}
                self._catalog = load_catalog(self._catalog_name, **given)
            table = self._catalog.load_table(self._identifier)
        self._check(table)
        self._table, self._history = table, None
        return table

    def _check(self, table: Table) -> None:
        if self._table is not None and table.metadata.table_uuid != self._table.metadata.table_uuid:
            raise DataLost(
                f"{self._name} was dropped and made anew while it was read: use a new checkpoint",
                condition="DATA_LOST.HISTORY_CHANGED",
            )
        if table.metadata.format_version < 2:
            raise FeedUnavailable(
                f"{self._name} has format 1, whose snapshots have no order of their own: upgrade it, such as with "
                "table.transaction().upgrade_table_version(2).commit_transaction()",
                condition="FEED_UNAVAILABLE.FORMAT_VERSION",
                found=table.metadata.format_version,
            )

    @contextmanager
    def _plainly(self, what: str, missing: type[PenstockError] = FeedUnavailable) -> Iterator[None]:
        try:
            yield
        except PenstockError:
            raise
        except (NoSuchTableError, NoSuchNamespaceError):
            raise FeedUnavailable(
                f"there is no {self._name} in the catalog {self._catalog_name!r}: name it with its namespace, as in "
                "namespace.table",
                condition="FEED_UNAVAILABLE.TABLE_NOT_FOUND",
                table=self._identifier,
                catalog=self._catalog_name,
            ) from None
        except FileNotFoundError as error:
            gone = missing is DataLost
            raise missing(
                f"{self._name}: {what}, a file is gone: {without_secrets(error, self._properties)}",
                condition="DATA_LOST" if gone else "FEED_UNAVAILABLE.CATALOG",
            ) from None
        except Exception as error:  # Catalogs raise what their drivers raise.
            if is_denied(error):
                told = f"{what}: {without_secrets(error, self._properties)}"
                raise access_denied(self._name, told, "the catalog's properties") from None
            raise FeedUnavailable(
                f"{self._name}: {what}: {without_secrets(error, self._properties)}. Look at the properties of the catalog "
                f"{self._catalog_name!r} ({', '.join(sorted(self._properties)) or 'none given'})",
                condition="FEED_UNAVAILABLE.CATALOG",
                catalog=self._catalog_name,
            ) from None
