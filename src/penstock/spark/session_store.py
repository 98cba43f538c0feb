"""The store that a session names, ``spark.penstock.url``, without a password in the session's settings.

Spark writes the settings that a session was given at run time into its event log with each job, and its redaction leaves them out of
account (4.2, 4.3, ``EventLoggingListener.redactProperties``). So the setting keeps what leads to the store, and this process the rest.
"""

from __future__ import annotations

from pyspark import TaskContext
from pyspark.sql import SparkSession

from penstock.errors import InvalidOption, InvalidUrl
from penstock.spark.internals.sessions import is_local
from penstock.spark.options import CONF_PREFIX
from penstock.store.url import parse_url

URL_SETTING = f"{CONF_PREFIX}url"

_whole: dict[str, str] = {}
"""URLs with their passwords, by what is shown of them."""


def default_url(spark: SparkSession) -> str | None:
    """The session's default store; None where it has none."""
    return whole_url(spark.conf.get(URL_SETTING, None))


def whole_url(shown: str | None) -> str | None:
    """The URL that a session's setting stands for."""
    return None if shown is None else _whole.get(shown, shown)


def hide_password(spark: SparkSession) -> None:
    """Take the password out of the session's settings, and keep it here."""
    url = spark.conf.get(URL_SETTING, None)
    try:
        parsed = None if url is None else parse_url(url)
    except InvalidUrl:
        # Whoever uses it is told.
        return
    if url is not None and parsed is not None and parsed.secrets:
        _whole[parsed.redacted] = url
        spark.conf.set(URL_SETTING, parsed.redacted)


# ---- store_reach: Whether the executors of a session can reach a store.


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
