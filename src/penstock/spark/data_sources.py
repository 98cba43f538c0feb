"""Making a session know a Python data source."""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from penstock.spark.internals.sessions import activate, is_classic
from penstock.spark.internals.sources import set_variables

_known: WeakKeyDictionary[SparkSession, dict[str, Any]] = WeakKeyDictionary()


def make_known(spark: SparkSession, source: type[DataSource], **baked: Any) -> None:
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
        set_variables(spark, source.name())
