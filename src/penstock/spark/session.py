"""Creation of Spark sessions with settings for streaming, and registration of data sources."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Mapping
from weakref import WeakKeyDictionary

from pyspark.sql import SparkSession
from pyspark.sql.datasource import DataSource

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError, InvalidOptionError, InvalidUrlError
from penstock.spark.data_source import PenstockDataSource
from penstock.spark.internals.python_workers import check_workers
from penstock.spark.internals.query_start import preset_environment
from penstock.spark.internals.sessions import (
    CHECKPOINT_FILE_MANAGER,
    activate,
    check_session,
    check_version,
    hide_source_warnings,
    is_classic,
    running_context,
    settings_of,
)
from penstock.spark.options import ALL_OPTIONS, CONF_PREFIX, INTERNAL
from penstock.store.url import parse_url

log = logging.getLogger("penstock.spark")

# Spark's default (4.2, 4.3), extended by the setting that may contain a password.
_REDACTED = r"(?i)secret|password|token|access[.]?key|credential|^spark\.penstock\.url$"

URL_SETTING = f"{CONF_PREFIX}url"

# With each job, Spark writes settings that were set at run time to its event log without redaction (4.2, 4.3,
# EventLoggingListener.redactProperties). So the setting has the URL without its password. All sessions of the
# process share this dictionary, because several sessions may have the same setting.
_urls_with_password: dict[str, str] = {}
"""Complete URLs by redacted URL."""
PIPELINED = "spark.python.udf.pipelined.enabled"
"""Whether rows are sent to Python and received from it at the same time (Spark 4.3)."""


def session(
    name: str = "penstock",
    *,
    master: str | None = None,
    url: str | None = None,
    stateful: bool = False,
    pipelined: bool = False,
    memory: str | None = None,
    conf: Mapping[str, str] | None = None,
) -> SparkSession:
    """Create a session for streaming, with Penstock registered.

    Parameters
    ----------
    name
        The application's name.
    master
        Spark's master URL; when None, spark-submit's or else ``local[*]``.
    url
        The session's default store.
    stateful
        Whether queries will keep state. Stateless queries need only the last two micro-batches of a
        checkpoint, and can be optimised while they run.
    pipelined
        Whether rows are sent to Python and received from it at the same time
        (``spark.python.udf.pipelined.enabled``). Continuous queries with Python functions need it, and other
        queries process a backlog faster with it. But Spark 4.3.0 then occasionally gives a task a worker
        whose channel is closed (``ClosedChannelException``). The task fails, and in local mode, where tasks
        are not retried, so does a micro-batch query. A continuous query resumes automatically.
    memory
        The driver's memory, such as ``4g``.
    conf
        Further settings, which override those made here.

    Raises
    ------
    InvalidInputError
        When a session is already running, since the settings can only be made at its start.
    InvalidUrlError
        When ``url`` is malformed.
    MissingDependencyError
        When the Python of Spark's workers lacks a package.
    """
    _refuse_second_session()
    if url is not None:
        parse_url(url)
    settings = (
        session_settings(stateful, pipelined)
        | ({"spark.driver.memory": memory} if memory else {})
        | dict(conf or {})
    )
    if url is not None:
        settings[f"{CONF_PREFIX}url"] = url
    builder = SparkSession.builder.appName(name)
    if master is not None:
        builder = builder.master(master)
    # The builder's settings are on the JVM's command line, which every user of the machine can read.
    runtime_settings = {key: value for key, value in settings.items() if key.startswith(CONF_PREFIX)}
    for key in settings.keys() - runtime_settings.keys():
        builder = builder.config(key, settings[key])
    _choose_python(settings)
    return _register_or_stop(builder.getOrCreate(), runtime_settings)


def _refuse_second_session() -> None:
    running = running_context()
    if running is not None:
        raise InvalidInputError(
            f"a Spark session is already running ({running.appName!r}), and settings of a new one can only "
            "be set when it starts: use penstock.register(spark) with the running one, or stop it first",
            condition="INVALID_INPUT.SESSION_RUNNING",
        )


def _choose_python(settings: Mapping[str, str]) -> None:
    """Set PYSPARK_PYTHON, because the first python3 on an executor's path may lack pyarrow."""
    # Without spark-submit, Spark only reads the variable, not the setting.
    if "spark.pyspark.python" in settings:
        os.environ["PYSPARK_PYTHON"] = settings["spark.pyspark.python"]
    else:
        os.environ.setdefault("PYSPARK_PYTHON", sys.executable)


def _register_or_stop(spark: SparkSession, defaults: Mapping[str, str]) -> SparkSession:
    try:
        for key, value in defaults.items():
            spark.conf.set(key, _without_password(value) if _is_url(key) else value)
            hide_source_warnings(spark)
        register(spark)
    except BaseException:
        spark.stop()
        raise
    return spark


def session_settings(stateful: bool, pipelined: bool) -> dict[str, str]:
    settings = {
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.execution.arrow.pyspark.enabled": "true",
        # With the largest value, Spark (4.2, 4.3) does not measure the size of a batch for Python after each
        # row, which takes longer than sending the batch.
        "spark.sql.execution.arrow.maxBytesPerBatch": str(2**31 - 1),
        "spark.sql.python.filterPushdown.enabled": "true",
        # For continuous queries: Unix domain sockets are three times as fast.
        "spark.python.unix.domain.socket.enabled": "true",
        "spark.redaction.regex": _REDACTED,
        "spark.sql.streaming.metricsEnabled": "true",
        "spark.sql.streaming.checkpointFileManagerClass": CHECKPOINT_FILE_MANAGER,
    }
    if pipelined:
        settings[PIPELINED] = "true"
    if not stateful:
        settings |= {
            "spark.sql.adaptive.streaming.stateless.enabled": "true",
            "spark.sql.streaming.minBatchesToRetain": "2",
        }
    return settings


_registered: WeakKeyDictionary[SparkSession, dict[str, tuple[type[DataSource], dict[str, object]]]]
_registered = WeakKeyDictionary()
"""The registered sources of each session by name, with their attributes; Spark warns if one is repeated."""
_registration_lock = threading.Lock()


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
    MissingDependencyError
        When the Python of Spark's workers lacks a package, or Penstock does not support the version of Spark.
    InvalidOptionError
        For an unknown setting ``spark.penstock.…``.
    InvalidUrlError
        When ``spark.penstock.url`` is malformed. The setting is removed, since it may contain a password.
    """
    check_session(spark)
    check_version(spark)
    check_workers(spark)
    _hide_passwords(spark)
    register_source(
        spark,
        PenstockDataSource,
        defaults=session_defaults(spark),
        master=spark.conf.get("spark.master", None),
        __module__=PenstockDataSource.__module__,
        __doc__=PenstockDataSource.__doc__,
    )


def default_url(spark: SparkSession) -> str | None:
    """Return the URL of the session's default store, if it has one."""
    return session_defaults(spark).get("url")


def _is_url(setting: str) -> bool:
    """Whether a setting is the URL of a store; names of options are case-insensitive."""
    return setting.startswith(CONF_PREFIX) and setting.lower() == URL_SETTING


def _hide_passwords(spark: SparkSession) -> None:
    """Move passwords from the session's settings into the memory of this process."""
    malformed: InvalidUrlError | None = None
    for setting, url in settings_of(spark).items():
        if not _is_url(setting):
            continue
        try:
            redacted = _without_password(url)
        except InvalidUrlError as error:
            # It is unknown which part of the URL is the password.
            spark.conf.unset(setting)
            malformed = error
            continue
        if redacted != url:
            spark.conf.set(setting, redacted)
            _warn_if_exposed(spark, setting)
    if malformed is not None:
        raise malformed


def _warn_if_exposed(spark: SparkSession, setting: str) -> None:
    if is_classic(spark) and spark.sparkContext.getConf().contains(setting):
        log.warning(
            "the password in %s was set before Spark started, so it is on the command line of the JVM, "
            "which every user of this machine can read, and in the event log: set it with spark.conf.set "
            "after the start, use penstock.session, or use password_env or password_file",
            setting,
            extra={"action": "password_exposed", "setting": setting},
        )


def _without_password(url: str) -> str:
    """Return a URL without its password, which this process remembers."""
    parsed = parse_url(url)
    if not parsed.secrets:
        return url
    _urls_with_password[parsed.redacted] = url
    return parsed.redacted


def session_defaults(spark: SparkSession) -> dict[str, str]:
    """Return the session's defaults for the options of the data source."""
    option_names = {name.lower(): name for name in ALL_OPTIONS if name not in INTERNAL}
    defaults = {}
    for setting, value in settings_of(spark).items():
        if not setting.startswith(CONF_PREFIX):
            continue
        name = setting.removeprefix(CONF_PREFIX)
        if name.lower() not in option_names:
            # It may be a misspelt URL setting with a password, and Spark logs settings.
            spark.conf.unset(setting)
            options = sorted(option_names.values())
            raise InvalidOptionError(
                f"unknown setting {in_quotes(setting)}.{did_you_mean(name, options)} Settings are "
                f"{CONF_PREFIX}<option>, with one of the options {', '.join(options)}",
                condition="INVALID_OPTION.UNKNOWN",
                option=name,
            )
        defaults[option_names[name.lower()]] = (
            _urls_with_password.get(value, value) if _is_url(setting) else value
        )
    return defaults


def register_source(spark: SparkSession, source: type[DataSource], **attributes: object) -> None:
    """Register a source with a session, if it is not registered yet, so that queries can start concurrently.

    The session becomes the active session of the thread, as with ``createDataFrame``. For writes, Spark only
    looks for the source in the active session (4.3, ``DataSource.lookupDataSource``). A thread has no active
    session if it did not create the session, or if its connection to the JVM was closed, for example by an
    interrupt.

    ``attributes`` are set on a subclass of the source, which is pickled by value for every Python worker.
    """
    if is_classic(spark):
        activate(spark)
    # Spark refuses concurrent registrations of the same name (4.3).
    with _registration_lock:
        registered = _registered.setdefault(spark, {})
        if registered.get(source.name()) == (source, attributes):
            return
        spark.dataSource.register(type(source.__name__, (source,), attributes) if attributes else source)
        if is_classic(spark):
            preset_environment(spark, source.name())
        registered[source.name()] = (source, attributes)
