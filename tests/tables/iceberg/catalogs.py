"""Catalogs of the kinds that users have, each on servers of its own, with the faults that they can have."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

from tests.support import object_proxy as glue_faults
from tests.support import rest_catalog as rest_faults
from tests.support.object_proxy import ObjectProxy, object_proxy
from tests.support.object_store import glue_properties, object_store
from tests.support.rest_catalog import RestCatalogServer, rest_catalog


class ServedCatalog(ABC):
    properties: Mapping[str, str]

    @abstractmethod
    def lose_reply(self) -> None:
        """Have the next commit done, and its client learn nothing of it."""


class Rest(ServedCatalog):
    def __init__(self, server: RestCatalogServer) -> None:
        self.server, self.properties = server, server.properties

    def lose_reply(self) -> None:
        self.server.fail("commit", rest_faults.no_reply)


class Glue(ServedCatalog):
    def __init__(self, proxy: ObjectProxy) -> None:
        self.proxy = proxy
        self.properties = glue_properties(proxy.endpoint, proxy.upstream)

    def lose_reply(self) -> None:
        self.proxy.fail("UpdateTable", glue_faults.no_reply)


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
