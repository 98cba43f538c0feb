"""What is read from a session's JVM, on the installed Spark."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from pyspark.sql import SparkSession

import penstock
from penstock.spark.internals import sessions


def test_a_clone_has_the_sessions_settings_and_views_but_its_own_changes(spark: SparkSession) -> None:
    spark.range(3).createOrReplaceTempView("three")
    own = sessions.clone_session(spark)
    own.conf.set("spark.sql.shuffle.partitions", "7")
    assert own.table("three").count() == 3
    assert own.conf.get("spark.sql.session.timeZone") == spark.conf.get("spark.sql.session.timeZone")
    assert spark.conf.get("spark.sql.shuffle.partitions") != "7"


def test_a_classic_session_has_a_context(spark: SparkSession) -> None:
    assert sessions.context_of(spark) is spark.sparkContext


def test_the_cause_of_an_error_of_the_jvm(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="DIVIDE_BY_ZERO") as caught:
        spark.sql("select 1 / id from range(1)").collect()
    assert sessions.cause_of(caught.value) is None
    outer = ValueError("outer")
    outer.__cause__ = caught.value
    assert sessions.cause_of(outer) is caught.value


@pytest.mark.parametrize("value", ["", "a -> b", "a\nb", "a\0b", "a\0b -> c"])
def test_all_settings_of_a_session(spark: SparkSession, value: str) -> None:
    own = sessions.clone_session(spark)
    own.conf.set("spark.penstock.x", value)
    assert sessions.settings_of(own)["spark.penstock.x"] == value
    assert sessions.settings_of(own) == own.conf.getAll


def test_two_objects_of_one_session_have_the_same_id(spark: SparkSession) -> None:
    other = SparkSession(spark.sparkContext, spark._jsparkSession)
    assert sessions.session_id(other) == sessions.session_id(spark)
    assert sessions.session_id(sessions.clone_session(spark)) != sessions.session_id(spark)


def test_a_session_is_made_active_in_a_thread_that_has_none(spark: SparkSession) -> None:
    found: list[str] = []

    def look() -> None:
        sessions.activate(spark)
        active = SparkSession.getActiveSession()
        assert active is not None
        found.append(sessions.session_id(active))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert found == [sessions.session_id(spark)]


def test_classic_sessions_and_dataframes_are_recognised(spark: SparkSession) -> None:
    assert sessions.is_classic(spark)
    assert sessions.is_classic(spark.range(1))
    assert not sessions.is_classic(object())
    sessions.check_session(spark)
    with pytest.raises(penstock.errors.InvalidInputError, match="a Spark session"):
        sessions.check_session("spark")


def test_the_task_slots_are_taken_from_the_master(spark: SparkSession) -> None:
    assert sessions.task_slots(spark) == 2
    assert sessions.is_local(str(spark.sparkContext.master))
    assert not sessions.is_local("spark://host:7077")


def test_the_local_disk_is_not_a_default_file_system(spark: SparkSession) -> None:
    assert sessions.default_file_system(spark) is None


def test_a_folder_is_removed_by_spark(spark: SparkSession, tmp_path: Path) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "file").touch()
    sessions.remove_folder(spark, folder.as_uri())
    assert not folder.exists()


def test_warnings_about_registered_sources_are_hidden(spark: SparkSession) -> None:
    sessions.hide_source_warnings(spark)
    assert spark._jvm is not None
    manager = spark._jvm.org.apache.logging.log4j.LogManager
    logger = manager.getLogger("org.apache.spark.sql.execution.datasources.DataSourceManager")
    assert str(logger.getLevel()) == "ERROR"


def test_a_jvm_exception_is_a_jvm_error(spark: SparkSession) -> None:
    assert spark._jvm is not None
    with pytest.raises(sessions.JvmException):
        spark._jvm.java.lang.Class.forName("no.such.Class")
    assert issubclass(sessions.JvmException, sessions.JvmError)


def test_the_context_of_this_process_is_found(spark: SparkSession) -> None:
    assert sessions.running_context() is spark.sparkContext


def test_dataframe_attributes_are_recognised(spark: SparkSession) -> None:
    assert sessions.is_dataframe_attribute("withWatermark")
    assert not sessions.is_dataframe_attribute("no_such_method")
    assert sessions.na_functions(spark.range(1)).df.columns == ["id"]
