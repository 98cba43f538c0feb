"""Whether the executors of a session can reach a store."""

from __future__ import annotations

from pyspark import TaskContext

from penstock.errors import InvalidOption
from penstock.spark.internals.sessions import is_local
from penstock.store.url import parse_url


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
    if master is None or parse_url(url).dialect != "sqlite" or is_local(master):
        return
    raise InvalidOption(
        f"a SQLite store is one machine's file, and this session runs on {master!r}, whose executors may be elsewhere: "
        "use a postgresql store",
        option="url",
        master=master,
    )
