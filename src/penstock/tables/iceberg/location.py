"""Location of an Iceberg table: its name, its catalog's URL and properties, and errors without secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING
from urllib.parse import unquote

from penstock.arguments import in_quotes
from penstock.errors import (
    InvalidNameError,
    MissingDependencyError,
    PenstockError,
    StoreUnavailableError,
    TableRefusedError,
)
from penstock.lake.storage import is_denied, prefixed_parameters, without_secrets

if TYPE_CHECKING:
    from pyiceberg.catalog import Catalog
    from pyiceberg.schema import Schema
    from pyiceberg.table import Table

_SCHEME = "iceberg:"
_NAME_PART = re.compile(r'"((?:[^"]|"")+)"(\.|$)|([^".][^.]*)(\.|$)', re.DOTALL)
_NEW_TABLE_PROPERTIES = {
    "format-version": "2",
    # Each commit writes a metadata file and a manifest, and a query commits often.
    "write.metadata.delete-after-commit.enabled": "true",
    "commit.manifest-merge.enabled": "true",
}
"""Properties of new tables."""


def is_iceberg(url: str | None) -> bool:
    """Whether a URL or a table name refers to an Iceberg catalog."""
    return url is not None and url.lower().startswith(_SCHEME)


@dataclass(frozen=True)
class IcebergLocation:
    """A table in a catalog, with the catalog's properties."""

    catalog_name: str
    identifier: tuple[str, ...]
    properties: Mapping[str, str] = field(default_factory=dict, repr=False, hash=False)
    _storage_properties: dict[str, object] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )
    """The properties of the table's storage, some of which the catalog may have vended."""

    @classmethod
    def of(cls, url: str, name: str) -> IcebergLocation:
        """Return the table with the given name in the catalog of the URL.

        The URL is ``iceberg:CATALOG?property.KEY=VALUE``, or the name itself:
        ``iceberg:CATALOG.NAMESPACE.TABLE``.
        """
        if url == name:
            catalog, *identifier = _split_name(name[len(_SCHEME) :], at_least=3)
            return cls(catalog, tuple(identifier))
        if is_iceberg(name):
            raise InvalidNameError(
                f"{in_quotes(name)} names a catalog, and so does the URL: write namespace.table, or leave "
                "the URL out",
                name=name,
            )
        target, _, query = url[len(_SCHEME) :].partition("?")
        properties = prefixed_parameters(query, "property.", "an Iceberg catalog", "the catalog's properties")
        return cls(unquote(target) or "default", tuple(_split_name(name, at_least=2)), properties)

    @property
    def label(self) -> str:
        """The table's name for messages."""
        return ".".join(self.identifier)

    @cached_property
    def catalog(self) -> Catalog:
        """The catalog; pyiceberg looks up missing properties in its own configuration."""
        from penstock.lake.catalogs import open_catalog

        with self.translating_errors("the catalog cannot be opened"):
            return open_catalog(self.catalog_name, self.properties)

    def open(self) -> Table:
        """Load the table."""
        table = self.find()
        if table is None:
            raise TableRefusedError(
                f"the Iceberg table {self.label} was dropped or renamed while the query ran: restore it, or "
                "start the query again, which creates an empty table and does not write earlier rows again",
                condition="TABLE_REFUSED.TABLE_GONE",
                table=self.label,
            )
        return table

    def find(self) -> Table | None:
        """Load the table; return None if it does not exist."""
        from pyiceberg.exceptions import (
            NoSuchIcebergTableError,
            NoSuchNamespaceError,
            NoSuchPropertyException,
            NoSuchTableError,
        )

        from penstock.lake.catalogs import storage_secrets

        try:
            with self.translating_errors(
                "it cannot be loaded",
                untranslated=(NoSuchTableError, NoSuchNamespaceError, NoSuchPropertyException),
            ):
                table = self.catalog.load_table(self.identifier)
        # A catalog may have tables of other formats, which lack the properties of an Iceberg table.
        except (NoSuchIcebergTableError, NoSuchPropertyException):
            raise self._not_iceberg() from None
        except (NoSuchTableError, NoSuchNamespaceError):
            return None
        self._storage_properties.update(storage_secrets(table))
        return table

    def create(self, schema: Schema) -> Table:
        """Create the table and its namespace, unless another process creates them, and load the table."""
        from pyiceberg.exceptions import NoSuchNamespaceError, TableAlreadyExistsError

        with self.translating_errors("it cannot be created"):
            for _ in range(2):
                try:
                    self.catalog.create_table(self.identifier, schema, properties=_NEW_TABLE_PROPERTIES)
                except NoSuchNamespaceError:
                    self._create_namespace()
                except TableAlreadyExistsError:
                    break
                else:
                    break
        table = self.find()
        if table is None:
            raise self._not_iceberg()
        return table

    def _not_iceberg(self) -> TableRefusedError:
        return TableRefusedError(
            f"{self.label} in the catalog {in_quotes(self.catalog_name)} is not an Iceberg table, but a view "
            "or a table of another format: choose another name",
            condition="TABLE_REFUSED.NOT_ICEBERG",
            table=self.label,
        )

    def _create_namespace(self) -> None:
        from pyiceberg.exceptions import NamespaceAlreadyExistsError

        for parts in range(1, len(self.identifier)):
            try:
                self.catalog.create_namespace(self.identifier[:parts])
            except NamespaceAlreadyExistsError:
                continue

    @contextmanager
    def translating_errors(
        self, what: str = "the operation failed", *, untranslated: tuple[type[Exception], ...] = ()
    ) -> Iterator[None]:
        """Translate the errors of pyiceberg, without secrets, except those ``untranslated``."""
        try:
            yield
        except PenstockError:
            raise
        except untranslated:
            raise
        except Exception as error:
            raise translate_error(error, self.label, what, *self.secrets) from None

    @property
    def secrets(self) -> Sequence[Mapping[str, object]]:
        """The known properties whose values must not appear in messages."""
        from penstock.lake.catalogs import client_secrets

        catalog = self.__dict__.get("catalog")
        return [self.properties, self._storage_properties, {} if catalog is None else client_secrets(catalog)]


def translate_error(
    error: Exception, table: str, what: str, *properties: Mapping[str, object]
) -> PenstockError:
    """Return Penstock's error for an error of pyiceberg or of a library that it uses."""
    from pyiceberg.exceptions import NotInstalledError, ValidationError, ValidationException

    reason = f"{what}: {without_secrets(error, *properties).rstrip('.')}"
    if isinstance(error, NotInstalledError):
        return MissingDependencyError(f"the catalog of the Iceberg table {table} needs a package: {reason}")
    # Arrow's errors about values are ValueErrors.
    refusals = (ValueError, TypeError, NotImplementedError, ValidationError, ValidationException)
    if isinstance(error, refusals) and not _is_catalog_reply_error(error):
        return TableRefusedError(
            f"the Iceberg table {table} refused the operation: {reason}",
            condition="TABLE_REFUSED.ICEBERG",
            table=table,
        )
    if is_denied(error):
        return StoreUnavailableError(
            f"the catalog or the storage of the Iceberg table {table} refuses access: {reason}. The "
            "credentials are wrong, expired or lack permission: set others in the properties of the catalog",
            condition="STORE_UNAVAILABLE.ACCESS_DENIED",
            table=table,
        )
    return StoreUnavailableError(
        f"the catalog or the storage of the Iceberg table {table} failed: {reason}. Check that it is up, and "
        "check the catalog's properties and the credentials",
        condition="STORE_UNAVAILABLE.ICEBERG",
        table=table,
    )


def _is_catalog_reply_error(error: Exception) -> bool:
    """Whether an error is about a catalog's reply, such as a proxy's error page, or about its URL."""
    return type(error).__module__.partition(".")[0] in ("pydantic_core", "requests")


def _split_name(name: str, *, at_least: int) -> list[str]:
    """Return the parts of a name, which are separated by dots and may be quoted."""
    parts: list[str] = []
    end, expects_part = 0, True
    while expects_part:
        match = _NAME_PART.match(name, end)
        if match is None:
            break
        quoted, plain = match.group(1), match.group(3)
        parts.append(plain if quoted is None else quoted.replace('""', '"'))
        end, expects_part = match.end(), match.group(0).endswith(".")
    if expects_part or end != len(name) or len(parts) < at_least:
        form = "iceberg:catalog.namespace.table" if at_least == 3 else "namespace.table"
        raise InvalidNameError(
            f"{in_quotes(name)} is not the name of an Iceberg table: write {form}, with double quotes around "
            "a part that has a dot or begins with a double quote",
            name=name,
        )
    return parts
