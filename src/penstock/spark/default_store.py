"""The store that a session names, ``spark.penstock.url``, without a password in the session's settings.

Spark writes the settings that a session was given at run time into its event log with each job, and its redaction leaves them out of
account (4.2, 4.3, ``EventLoggingListener.redactProperties``). So the setting keeps what leads to the store, and this process the rest.
"""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.errors import InvalidUrl
from penstock.spark.options import CONF_PREFIX
from penstock.store.url import parse_url

URL = f"{CONF_PREFIX}url"

_whole: dict[str, str] = {}
"""URLs with their passwords, by what is shown of them."""


def default_url(spark: SparkSession) -> str | None:
    """The session's default store; None where it has none."""
    return whole_url(spark.conf.get(URL, None))


def whole_url(shown: str | None) -> str | None:
    """The URL that a session's setting stands for."""
    return None if shown is None else _whole.get(shown, shown)


def hide_password(spark: SparkSession) -> None:
    """Take the password out of the session's settings, and keep it here."""
    url = spark.conf.get(URL, None)
    try:
        parsed = None if url is None else parse_url(url)
    except InvalidUrl:
        # Whoever uses it is told.
        return
    if url is not None and parsed is not None and parsed.secrets:
        _whole[parsed.redacted] = url
        spark.conf.set(URL, parsed.redacted)
