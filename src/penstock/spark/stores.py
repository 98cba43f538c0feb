"""The stores that a process has open: one for each URL, kept while the worker process lives."""

from __future__ import annotations

import os
from functools import lru_cache

from pyspark import TaskContext

from penstock.errors import InvalidOption
from penstock.queue.store import Store, connect
from penstock.store.url import parse_url


def open_store(url: str) -> Store:
    """The store at a URL, opened once for each process."""
    # A forked worker must not share its parent's connections.
    return _open(url, os.getpid())


@lru_cache(maxsize=16)
def _open(url: str, _process: int) -> Store:
    return connect(url, create=False)


def check_reach(url: str, master: str | None) -> None:
    """Refuse an embedded store on a cluster, whose executors could not see the file.

    Parameters
    ----------
    master
        Spark's master URL; None when it is not known here, in which case the task's own properties tell.
    """
    if master is None:
        context = TaskContext.get()
        master = context.getLocalProperty("spark.master") if context is not None else None
    if (
        master is None
        or parse_url(url).dialect != "sqlite"
        or master == "local"
        or master.startswith("local[")
    ):
        return
    raise InvalidOption(
        f"a SQLite store is one machine's file, and this session runs on {master!r}, whose executors may be elsewhere: "
        "use a postgresql store",
        option="url",
        master=master,
    )
