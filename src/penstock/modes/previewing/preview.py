"""``modes.preview``: runs a transformation over a few small micro-batches in each output mode."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from pyspark.sql import DataFrame, SparkSession

from penstock.arguments import column_names, did_you_mean, in_quotes, refusal, refused_arguments
from penstock.errors import InvalidInputError
from penstock.modes.checking.plan import PROVIDER_SETTING
from penstock.modes.checking.report import MODES
from penstock.modes.previewing.inputs import Input, input_of
from penstock.modes.previewing.result import Preview
from penstock.modes.previewing.run import read_input, run
from penstock.spark.internals.sessions import (
    CHECKPOINT_FILE_MANAGER,
    check_session,
    clone_session,
    is_classic,
    is_local,
)

_ONE_INPUT = "batches"


def preview(
    spark: SparkSession,
    transform: Callable[..., DataFrame],
    batches: object,
    *,
    event_time: tuple[str, str] | Mapping[str, tuple[str, str]] | None = None,
    schema: object = None,
    modes: str | Iterable[str] = MODES,
    folder: str | Path | None = None,
) -> Preview:
    """Run a transformation over a few small micro-batches in each output mode, and return what each emits.

    Each of ``batches`` is one micro-batch; after the last one, Spark itself runs micro-batches without data.
    The transformation can use the session's functions and views. The preview leaves no files, and does not
    change the session's views and settings.

    Parameters
    ----------
    spark
        A classic session; its settings apply, except ``spark.sql.shuffle.partitions``, which is 1, or 2 with
        state in RocksDB.
    transform
        A function that takes a streaming DataFrame and returns another. If ``batches`` has several inputs, it
        takes one DataFrame for each by name.
    batches
        A list of micro-batches. Each is a list of rows (dicts, pyspark Rows, or tuples and a schema), an
        Arrow table, a pandas DataFrame or a batch DataFrame of Spark. A dict of such lists gives several
        inputs.
    event_time
        A column and a delay, such as ``("ts", "10 minutes")``: the transformation gets its input with that
        watermark. For several inputs, a dict by their names.
    schema
        The schema of the rows: DDL, a ``StructType`` or a ``pyarrow.Schema``; inferred if None. With it,
        dates and times may be text. For several inputs, a dict by their names.
    modes
        The output modes, in the order of the result.
    folder
        The directory for temporary files, which the executors also read. By default, this machine's directory
        for temporary files, which a session on a cluster cannot use.

    Raises
    ------
    InvalidInputError, SchemaMismatchError
        When an argument has the wrong type, or rows do not fit the schema.
    Exception
        Any error that the transformation raises.
    """
    _check_spark(spark, folder)
    selected_modes = _modes(modes)
    inputs = _inputs(spark, batches, schema, event_time)
    _check_transform(transform, inputs if isinstance(batches, Mapping) else None)
    session = _preview_session(spark, folder)
    temporary = TemporaryDirectory(prefix="penstock-preview-", dir=folder, ignore_cleanup_errors=True)
    with _keeping_active_session(), temporary as name:
        root = Path(name).resolve()
        frames = {
            name: read_input(session, preview_input, root / f"input-{number}")
            for number, (name, preview_input) in enumerate(inputs.items())
        }
        result = transform(**frames) if isinstance(batches, Mapping) else transform(frames[_ONE_INPUT])
        _check_result(result)
        previews = [
            run(result, mode, list(inputs.values()), root / f"checkpoint-{mode}") for mode in selected_modes
        ]
    return Preview(tuple(previews), session.conf.get("spark.sql.session.timeZone") or "UTC")


def _check_spark(spark: SparkSession, folder: str | Path | None) -> None:
    check_session(spark)
    if not is_classic(spark):
        raise InvalidInputError(
            "a preview needs a classic Spark session, and this one uses Spark Connect: use one with a local "
            "master, such as penstock.session(master='local[2]') returns",
            condition="PREVIEW_NEEDS_CLASSIC",
        )
    master = str(spark.sparkContext.master)
    if folder is None and not is_local(master):
        raise InvalidInputError(
            f"the session runs on {in_quotes(master)}, whose executors may not see this machine's temporary "
            "files: pass folder=, a directory that all machines share, or use a session with a local master",
            condition="INVALID_INPUT.SHARED_FOLDER_NEEDED",
            master=master,
        )


def _modes(modes: str | Iterable[str]) -> tuple[str, ...]:
    selected = tuple(dict.fromkeys(mode.lower() for mode in column_names("modes", modes)))
    for mode in selected:
        if mode not in MODES:
            raise InvalidInputError(
                f"there is no output mode {in_quotes(mode)}, only "
                f"{', '.join(MODES)}.{did_you_mean(mode, MODES)}",
                mode=mode,
            )
    if not selected:
        raise InvalidInputError(f"modes is empty: pass some of {', '.join(MODES)}")
    return selected


def _inputs(spark: SparkSession, batches: object, schema: object, event_time: object) -> dict[str, Input]:
    batches_by_name = batches if isinstance(batches, Mapping) else {_ONE_INPUT: batches}
    if not batches_by_name:
        raise InvalidInputError(
            "batches is empty: pass a list of micro-batches for each input", parameter="batches"
        )
    for name, value in (("schema", schema), ("event_time", event_time)):
        unknown = value.keys() - batches_by_name.keys() if isinstance(value, Mapping) else set()
        if unknown:
            known = ", ".join(map(str, batches_by_name))
            raise InvalidInputError(
                f"{name} names an input {in_quotes(min(unknown))}, and batches has {known}: use the same "
                "names",
                parameter=name,
            )
    return {
        name: input_of(
            spark,
            name,
            named_batches,
            schema.get(name) if isinstance(schema, Mapping) else schema,
            _watermark(event_time.get(name) if isinstance(event_time, Mapping) else event_time),
        )
        for name, named_batches in batches_by_name.items()
    }


def _watermark(event_time: object) -> tuple[str, str] | None:
    match event_time:
        case None:
            return None
        case [str() as column, str() as delay]:
            return column, delay
    raise refusal("event_time", event_time, 'a column and a delay, such as ("ts", "10 minutes")')


def _check_transform(transform: object, inputs: Mapping[str, Input] | None) -> None:
    if not callable(transform):
        raise refusal("transform", transform, "a function of a DataFrame that returns another")
    if inputs is None:
        return
    refused = refused_arguments(transform, **dict.fromkeys(inputs))
    if refused is not None:
        raise InvalidInputError(
            f"transform does not take the inputs {', '.join(inputs)} by name ({refused}): rename its "
            "parameters",
            condition="INVALID_INPUT.FUNCTION_PARAMETERS",
            parameter="transform",
        )


def _preview_session(spark: SparkSession, folder: str | Path | None) -> SparkSession:
    """Clone a session with its views, functions and settings, and change some of the clone's settings."""
    clone = clone_session(spark)
    # With state in RocksDB, tasks fail that run an aggregation and then a limit, as they do in one partition.
    is_rocksdb = str(clone.conf.get(PROVIDER_SETTING)).endswith("RocksDBStateStoreProvider")
    clone.conf.set("spark.sql.shuffle.partitions", "2" if is_rocksdb else "1")
    clone.conf.set("spark.sql.streaming.numRecentProgressUpdates", "100")
    if folder is None:
        clone.conf.set("spark.sql.streaming.checkpointFileManagerClass", CHECKPOINT_FILE_MANAGER)
    return clone


@contextmanager
def _keeping_active_session() -> Iterator[None]:
    """Restore the active session: a transformation that creates a DataFrame activates the clone."""
    active = SparkSession.getActiveSession()
    try:
        yield
    finally:
        if active is not None:
            # The public way to activate a session in Python and in the JVM.
            active.createDataFrame([], "none int")


def _check_result(result: object) -> None:
    if not isinstance(result, DataFrame):
        raise InvalidInputError(
            f"transform returned {in_quotes(result)}: it must return a DataFrame",
            condition="INVALID_INPUT.FUNCTION_RESULT",
            parameter="transform",
        )
    if not result.isStreaming:
        raise InvalidInputError(
            "transform returned a DataFrame that is not streaming: derive it from the one that it takes",
            condition="INVALID_INPUT.FUNCTION_RESULT",
            parameter="transform",
        )
