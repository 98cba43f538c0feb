"""The stores that a process has opened: one for each URL, kept until the process ends."""

from __future__ import annotations

import os
from dataclasses import dataclass

from penstock.errors import StoreError
from penstock.queue.store import Store, connect
from penstock.store.database import RETRY_SECONDS
from penstock.store.forks import Guard
from penstock.store.sqlite.database import file_at
from penstock.store.url import StoreUrl, parse_url


@dataclass(frozen=True)
class _Opened:
    store: Store
    file: tuple[int, int] | None


_open: dict[tuple[str, int], _Opened] = {}
_guard = Guard()


def open_store(url: str, *, verify: bool = False) -> Store:
    """Return the store at a URL, opened once in each process.

    Parameters
    ----------
    verify
        Whether to check that the database still holds the same store: Spark keeps its Python workers, and
        the store may have been dropped and recreated since.
    """
    # A forked worker must not share its parent's connections.
    key = (url, os.getpid())
    with _guard:
        opened = _open.get(key)
        if opened is not None and not _same(opened, parse_url(url), verify):
            opened.store.close()
            opened = None
        if opened is None:
            store = connect(url, create=False, timeout=RETRY_SECONDS)
            opened = _open[key] = _Opened(store, _file(parse_url(url)))
        return opened.store


def _same(opened: _Opened, url: StoreUrl, verify: bool) -> bool:
    if opened.file != _file(url):
        return False
    if not verify or url.dialect == "sqlite":
        return True
    try:
        row = opened.store.database.run(lambda tx: tx.one("read_store"), write=False)
    except StoreError:
        return False
    return row is not None and row.uuid == opened.store.uuid


def _file(url: StoreUrl) -> tuple[int, int] | None:
    return file_at(url.target) if url.dialect == "sqlite" else None
