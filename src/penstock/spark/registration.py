"""Registration of Python data sources with a session."""

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
from penstock.spark.session_store import URL_SETTING, hide_password, url_with_password
from penstock.spark.source.data_source import PenstockDataSource

_registered: WeakKeyDictionary[SparkSession, dict[str, Any]] = WeakKeyDictionary()


def register(spark: SparkSession) -> None:
    """Register ``format("penstock")`` with a session and its defaults.

    Call it again after you change the defaults.

    Defaults are settings such as ``spark.penstock.url`` and ``spark.penstock.guarantee``. Without this call
    Spark finds the data source too, but without defaults. The password is removed from
    ``spark.penstock.url``, which Spark writes into its event log, and kept in this process.

    Also call it in any thread, other than the one that created the session, that writes with
    ``format("penstock")``: Spark looks for a data source in the active session of the calling thread. A
    pipeline does this itself.

    Parameters
    ----------
    spark
        A session, classic or Spark Connect.

    Raises
    ------
    MissingDependency
        When the Python of Spark's workers lacks a package, or Penstock does not support the version of Spark.
    InvalidOption
        For an unknown setting ``spark.penstock.…``.
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
    """Return the session's defaults for the options of the data source.

    Raises
    ------
    InvalidOption
        For an unknown setting ``spark.penstock.…``.
    """
    known = {name.lower(): name for name in ALL_OPTIONS}
    defaults = {}
    for setting, value in spark.conf.getAll.items():
        if not setting.startswith(CONF_PREFIX):
            continue
        name = setting.removeprefix(CONF_PREFIX)
        if name.lower() not in known:
            raise InvalidOption(
                f"unknown setting {in_quotes(setting)}.{did_you_mean(name, ALL_OPTIONS)} Settings are "
                f"{CONF_PREFIX}<option>, with one of the options {', '.join(sorted(ALL_OPTIONS))}",
                option=name,
            )
        defaults[known[name.lower()]] = str(url_with_password(value) if setting == URL_SETTING else value)
    return defaults


def register_source(spark: SparkSession, source: type[DataSource], **attributes: Any) -> None:
    """Register a source once, such that queries may start at the same time.

    Spark warns at each further registration.

    The session becomes the active one of the thread, as with ``createDataFrame``. For writes, Spark looks for
    the source in the active session only (4.3, ``DataSource.lookupDataSource``). A thread has none if it did
    not create the session, or if its connection to the JVM was closed, for example by an interrupt.

    Parameters
    ----------
    attributes
        Class attributes for a subclass of the source. It is pickled by value, so it reaches every Python
        worker.
    """
    if is_classic(spark):
        activate(spark)
    registered = _registered.setdefault(spark, {})
    if registered.get(source.name()) == (source, attributes):
        return
    spark.dataSource.register(type(source.__name__, (source,), dict(attributes)) if attributes else source)
    registered[source.name()] = (source, attributes)
    if is_classic(spark):
        preset_environment(spark, source.name())
