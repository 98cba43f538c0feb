"""Making a Spark session know the data source."""

from __future__ import annotations

from pyspark.sql import SparkSession

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidOption
from penstock.spark.data_sources import make_known
from penstock.spark.default_url import URL, hide_password, whole_url
from penstock.spark.given import CONF_PREFIX
from penstock.spark.internals.sessions import check_session
from penstock.spark.internals.versions import check_version
from penstock.spark.internals.workers import check_workers
from penstock.spark.options import ALL
from penstock.spark.source import PenstockDataSource


def register(spark: SparkSession) -> None:
    """Make ``format("penstock")`` known to a session, with the session's defaults; call it again after changing them.

    A thread other than the one that made the session calls it before it writes with ``format("penstock")``: Spark looks for a data
    source in the calling thread's active session, which this one becomes. A pipeline does so itself.

    Defaults are settings such as ``spark.penstock.url`` and ``spark.penstock.guarantee``. Without this call Spark finds
    the data source by itself too, then without defaults. The password of ``spark.penstock.url`` is taken out of that setting, which
    Spark writes into its event log, and kept in this process.

    Parameters
    ----------
    spark
        A session, classic or Spark Connect.

    Raises
    ------
    MissingDependency
        When the Python of Spark's workers lacks a package, or Spark is of a version that Penstock does not know.
    InvalidOption
        For a setting ``spark.penstock.…`` that is no option.
    """
    check_session(spark)
    check_version(spark)
    check_workers(spark)
    hide_password(spark)
    make_known(
        spark,
        PenstockDataSource,
        defaults=defaults(spark),
        master=spark.conf.get("spark.master", None),
        __module__=PenstockDataSource.__module__,
        __doc__=PenstockDataSource.__doc__,
    )


def defaults(spark: SparkSession) -> dict[str, str]:
    """The session's defaults for the data source's options."""
    known = {name.lower(): name for name in ALL}
    found = {}
    for setting, value in spark.conf.getAll.items():
        if not setting.startswith(CONF_PREFIX):
            continue
        name = setting.removeprefix(CONF_PREFIX)
        if name.lower() not in known:
            raise InvalidOption(
                f"unknown setting {in_quotes(setting)}.{did_you_mean(name, ALL)} Settings are {CONF_PREFIX}<option>, with "
                f"one of the options {', '.join(sorted(ALL))}",
                option=name,
            )
        found[known[name.lower()]] = str(whole_url(value) if setting == URL else value)
    return found
