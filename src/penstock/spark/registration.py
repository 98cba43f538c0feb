"""Making a session know a Python data source."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidOption
from penstock.spark.internals.formats import preset_environment
from penstock.spark.internals.requirements import check_version, check_workers
from penstock.spark.internals.sessions import activate, check_session, is_classic
from penstock.spark.options import ALL_OPTIONS, CONF_PREFIX
from penstock.spark.session_store import URL_SETTING, hide_password, whole_url
from penstock.spark.source.data_source import PenstockDataSource

_known: WeakKeyDictionary[SparkSession, dict[str, Any]] = WeakKeyDictionary()


def register_source(spark: SparkSession, source: type[DataSource], **baked: Any) -> None:
    """Register a source such that queries may start at the same time; not again, for Spark warns each time.

    The session becomes the active one of the thread, as with ``createDataFrame``. Where rows are written, Spark looks for the source
    there alone (4.3, ``DataSource.lookupDataSource``), and a thread has none that did not make the session, or whose way to
    the JVM broke off (an interrupt can do it).

    Parameters
    ----------
    baked
        What the class is to have besides; a class made here is pickled by value, so it reaches every Python worker.
    """
    if is_classic(spark):
        activate(spark)
    known = _known.setdefault(spark, {})
    if known.get(source.name()) == (source, baked):
        return
    spark.dataSource.register(type(source.__name__, (source,), dict(baked)) if baked else source)
    known[source.name()] = (source, baked)
    if is_classic(spark):
        preset_environment(spark, source.name())


# ---- register: Making a Spark session know the data source.


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
    register_source(
        spark,
        PenstockDataSource,
        defaults=session_defaults(spark),
        master=spark.conf.get("spark.master", None),
        __module__=PenstockDataSource.__module__,
        __doc__=PenstockDataSource.__doc__,
    )


def session_defaults(spark: SparkSession) -> dict[str, str]:
    """The session's defaults for the data source's options."""
    known = {name.lower(): name for name in ALL_OPTIONS}
    found = {}
    for setting, value in spark.conf.getAll.items():
        if not setting.startswith(CONF_PREFIX):
            continue
        name = setting.removeprefix(CONF_PREFIX)
        if name.lower() not in known:
            raise InvalidOption(
                f"unknown setting {in_quotes(setting)}.{did_you_mean(name, ALL_OPTIONS)} Settings are {CONF_PREFIX}<option>, with "
                f"one of the options {', '.join(sorted(ALL_OPTIONS))}",
                option=name,
            )
        found[known[name.lower()]] = str(whole_url(value) if setting == URL_SETTING else value)
    return found
