"""Iceberg catalogs of the kinds that users have, each on its own server, with faults for commits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from urllib.parse import quote, urlencode

from tests.support import object_proxy as glue_faults
from tests.support import rest_catalog as rest_faults
from tests.support.object_proxy import Exchange, ObjectProxy, object_proxy
from tests.support.object_store import glue_properties, object_store
from tests.support.rest_catalog import CLIENT_SECRET, Reply, RestCatalogServer, rest_catalog


class ServedCatalog(ABC):
    properties: Mapping[str, str]
    secret: str
    """A secret in the properties, which must not be shown anywhere."""

    @property
    def url(self) -> str:
        """The catalog's URL for Penstock."""
        parameters = {f"property.{name}": value for name, value in self.properties.items()}
        return f"iceberg:lake?{urlencode(parameters, quote_via=quote)}"

    @abstractmethod
    def lose_reply(self) -> None:
        """Execute the next commit, but do not reply to the client."""

    @abstractmethod
    def before_commit(self, work: Callable[[], object]) -> None:
        """Call a function when the next commit arrives, before it is executed."""


class Rest(ServedCatalog):
    secret = CLIENT_SECRET

    def __init__(self, server: RestCatalogServer) -> None:
        self.server, self.properties = server, server.properties

    def lose_reply(self) -> None:
        self.server.fail("commit", rest_faults.no_reply)

    def before_commit(self, work: Callable[[], object]) -> None:
        def fault(commit: Callable[[], Reply]) -> Reply:
            work()
            return commit()

        self.server.fail("commit", fault)


class Glue(ServedCatalog):
    def __init__(self, proxy: ObjectProxy) -> None:
        self.proxy = proxy
        self.properties = glue_properties(proxy.endpoint, proxy.upstream)
        self.secret = self.properties["glue.secret-access-key"]

    def lose_reply(self) -> None:
        self.proxy.fail("UpdateTable", glue_faults.no_reply)

    def before_commit(self, work: Callable[[], object]) -> None:
        def fault(exchange: Exchange) -> None:
            work()
            exchange.answer(*exchange.forward())

        self.proxy.fail("UpdateTable", fault)


@contextmanager
def _rest(folder: Path) -> Iterator[Rest]:
    with rest_catalog(folder / "served") as server:
        yield Rest(server)


@contextmanager
def _glue(folder: Path) -> Iterator[Glue]:
    with object_store() as store, object_proxy(store.endpoint) as proxy:
        store.bucket("lake")
        yield Glue(proxy)


CATALOGS: dict[str, Callable[[Path], AbstractContextManager[ServedCatalog]]] = {"rest": _rest, "glue": _glue}
