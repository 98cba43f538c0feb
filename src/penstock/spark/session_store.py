"""The default store of a session (``spark.penstock.url``), its password, and whether executors can reach it.

Spark writes settings that were made at run time into its event log with each job, without redaction (4.2,
4.3, ``EventLoggingListener.redactProperties``). So the setting has the URL without its password, and this
process keeps the password.
"""

from __future__ import annotations

from pyspark import TaskContext
from pyspark.sql import SparkSession

from penstock.errors import InvalidOption, InvalidUrl
from penstock.spark.internals.sessions import is_local
from penstock.spark.options import CONF_PREFIX
from penstock.store.url import parse_url

URL_SETTING = f"{CONF_PREFIX}url"

# One for the process, since any session may have the setting that another one has.
_urls_with_password: dict[str, str] = {}
"""Complete URLs by their redacted form."""


def default_url(spark: SparkSession) -> str | None:
    """Return the session's default store, if it has one."""
    return url_with_password(spark.conf.get(URL_SETTING, None))


def url_with_password(redacted: str | None) -> str | None:
    """Return the complete URL for the value of a session's setting."""
    return None if redacted is None else _urls_with_password.get(redacted, redacted)


def hide_password(spark: SparkSession) -> None:
    """Move the password from the session's setting into this process's memory."""
    url = spark.conf.get(URL_SETTING, None)
    try:
        parsed = None if url is None else parse_url(url)
    except InvalidUrl:
        # The error is raised where the URL is used.
        return
    if url is not None and parsed is not None and parsed.secrets:
        _urls_with_password[parsed.redacted] = url
        spark.conf.set(URL_SETTING, parsed.redacted)


def check_reach(url: str, master: str | None) -> None:
    """Refuse an embedded store on a cluster, whose executors could not see the file.

    Parameters
    ----------
    master
        Spark's master URL; when None, it is read from the properties of the running task.
    """
    if master is None:
        context = TaskContext.get()
        master = context.getLocalProperty("spark.master") if context is not None else None
    if master is None or parse_url(url).dialect != "sqlite" or is_local(master):
        return
    raise InvalidOption(
        f"a SQLite store is one machine's file, and this session runs on {master!r}, whose executors may be "
        "elsewhere: use a postgresql store",
        option="url",
        master=master,
    )
