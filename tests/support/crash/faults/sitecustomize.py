"""Stops a Python process of a Spark application at a state of the commit protocol, for a test to kill it.

Each Python process of Spark imports this module when it starts, if this folder is on PYTHONPATH. The
environment variable FAULTS maps the name of a case (that of its consumer and its sink) to the state and the
micro-batch at which to stop or fail, the checkpoint, and the marker file that is created there.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.support.starting import start

start()

FAULTS: dict[str, dict[str, Any]] = json.loads(os.environ.get("FAULTS", "{}"))


def stop(case: str, state: str, reached: Callable[[dict[str, Any]], bool]) -> None:
    fault = FAULTS.get(case)
    if fault is None or fault["state"] != state or not reached(fault):
        return
    marker = fault["marker"]
    try:
        # Only the first process of a case that reaches the state stops.
        file = os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
    except FileExistsError:
        return
    os.write(file, str(os.getpid()).encode())
    os.close(file)
    if fault["raises"]:
        raise OSError(f"a fault of {case} after {state}")
    while not os.path.exists(f"{marker}.released"):
        time.sleep(0.02)


def fill_disk(case: str, state: str, batch_id: int) -> None:
    """Let no file of this process grow, as on a full disk."""
    fault = FAULTS.get(case)
    if fault is not None and fault["state"] == state and fault["batch"] == batch_id:
        Path(fault["marker"]).touch()
        _, hard_limit = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard_limit))


def in_batch(batch_id: int) -> Callable[[dict[str, Any]], bool]:
    return lambda fault: fault["batch"] == batch_id


def planned(fault: dict[str, Any]) -> bool:
    return _newest(fault, "offsets") == fault["batch"]


def logged(fault: dict[str, Any]) -> bool:
    return _newest(fault, "commits") == fault["batch"]


def _newest(fault: dict[str, Any], log: str) -> int:
    names = [path.name for path in Path(fault["checkpoint"], log).glob("*")]
    return max((int(name) for name in names if name.isdigit()), default=-1)


def patch_owner(module: ModuleType) -> None:
    owner = module.Owner
    init, plan, observe = owner.__init__, owner.plan, owner.observe

    def init_and_stop(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        stop(self.consumer, "OWN", lambda _: True)

    def plan_and_stop(self: Any, *args: Any) -> None:
        plan(self, *args)
        stop(self.consumer, "PLANNED", planned)

    def observe_and_stop(self: Any, *args: Any) -> Any:
        stop(self.consumer, "LOGGED", logged)
        offset = observe(self, *args)
        stop(self.consumer, "SAFE", logged)
        return offset

    owner.__init__, owner.plan, owner.observe = init_and_stop, plan_and_stop, observe_and_stop


def patch_queue_writers(module: ModuleType) -> None:
    _patch_tasks(module)
    _patch_commit(module)


def _patch_tasks(module: ModuleType) -> None:
    writer = module.TaskWriter
    stage, append_once, append = writer.stage, writer.append_once, writer.append

    def stage_and_stop(self: Any, app_id: str, batch_id: int, batches: Any) -> Any:
        fill_disk(self._queue.name, "FULL_FOR_TASK", batch_id)
        written = stage(self, app_id, batch_id, batches)
        if self.task == 0:
            stop(self._queue.name, "HALF", in_batch(batch_id))
        return written

    def append_once_and_stop(self: Any, key: Any, *args: Any, **kwargs: Any) -> Any:
        fill_disk(self._queue.name, "FULL_FOR_TASK", key.batch_id)
        written = append_once(self, key, *args, **kwargs)
        if self.task == 0:
            stop(self._queue.name, "HALF", in_batch(key.batch_id))
        return written

    def append_and_stop(self: Any, batches: Any) -> Any:
        from penstock.spark.queue_writers import StreamTask

        written = append(self, batches)
        if self.task == 0:
            stop(self._queue.name, "HALF", in_batch(StreamTask.current().batch_id))
        return written

    write_objects = module.write_objects

    def write_and_stop(options: Any, queue: Any, objects: Any, batches: Any) -> Any:
        written = write_objects(options, queue, objects, batches)
        if written.task == 0:
            stop(queue.name, "HALF", in_batch(module.StreamTask.current().batch_id))
        return written

    writer.stage, writer.append_once, writer.append = stage_and_stop, append_once_and_stop, append_and_stop
    module.write_objects = write_and_stop


def patch_batch(module: ModuleType) -> None:
    commit_batch = module.commit_batch

    def commit_and_stop(database: Any, batch: Any) -> Any:
        stop(batch.sink.name, "STAGED", in_batch(batch.batch_id))
        fill_disk(batch.sink.name, "FULL_FOR_COMMIT", batch.batch_id)
        appended = commit_batch(database, batch)
        stop(batch.sink.name, "COMMITTED", in_batch(batch.batch_id))
        return appended

    module.commit_batch = commit_and_stop


def _patch_commit(module: ModuleType) -> None:
    """If nothing is committed, stop before and after the call that would commit it."""
    writer = module.QueueStreamWriter
    commit = writer.commit

    def commit_and_stop(self: Any, messages: Any, batch_id: int) -> None:
        uncommitted = self._options.guarantee == "at_least_once"
        if uncommitted:
            stop(self._queue.name, "STAGED", in_batch(batch_id))
        commit(self, messages, batch_id)
        if uncommitted:
            stop(self._queue.name, "COMMITTED", in_batch(batch_id))

    writer.commit = commit_and_stop


def patch_table_tasks(module: ModuleType) -> None:
    task = module.StageTask
    write_rows = task.write_rows

    def write_and_stop(self: Any, context: Any, batches: Any) -> Any:
        staged = write_rows(self, context, batches)
        if context.partitionId() == 0:
            stop(self.encoder.layout.name.table, "HALF", in_batch(self.stage.batch_id))
        return staged

    task.write_rows = write_and_stop


def patch_delta_tasks(module: ModuleType) -> None:
    task = module.DeltaStageTask
    write_rows = task.write_rows

    def write_and_stop(self: Any, batches: Any) -> Any:
        from pyspark import TaskContext

        staged = write_rows(self, batches)
        context = TaskContext.get()
        if context is not None and context.partitionId() == 0:
            stop(Path(self.stage.location.path).name, "HALF", in_batch(self.stage.batch_id))
        return staged

    task.write_rows = write_and_stop


COMMITTING_BATCHES: dict[str, int] = {}
"""The micro-batch that the driver of a case's Delta table commits, by the name of the case."""


def patch_delta_writer(module: ModuleType) -> None:
    """Stop before and after the commit to the table's log, which replaces the ledger."""
    writer = module.DeltaWriter
    write, commit = writer.__call__, writer._commit

    def commit_and_stop(self: Any, stage: Any, *args: Any) -> None:
        name = Path(self.location.path).name
        COMMITTING_BATCHES[name] = stage.batch_id
        stop(name, "STAGED", in_batch(stage.batch_id))
        commit(self, stage, *args)
        stop(name, "COMMITTED", in_batch(stage.batch_id))

    def write_and_stop(self: Any, frame: Any, batch_id: int) -> None:
        write(self, frame, batch_id)
        stop(Path(self.location.path).name, "COMMITTED", in_batch(batch_id))

    writer._commit, writer.__call__ = commit_and_stop, write_and_stop


def patch_copy_on_write(module: ModuleType) -> None:
    """Stop between the tasks that rewrite stored files and the commit that adds the new ones."""
    copies = module.CopyOnWrite
    replacement = copies.replacement

    def replace_and_stop(self: Any, *args: Any) -> Any:
        rewritten = replacement(self, *args)
        stop(Path(self.stage.location.path).name, "REWRITTEN", in_batch(self.stage.batch_id))
        return rewritten

    copies.replacement = replace_and_stop


def patch_delta_applied(module: ModuleType) -> None:
    """Stop between the commit of the applied keys and that of the table."""
    applied = module.AppliedTable
    record = applied.record

    def record_and_stop(self: Any, *args: Any) -> int:
        version = record(self, *args)
        name = Path(self.location.path).parents[1].name
        stop(name, "REMEMBERED", in_batch(COMMITTING_BATCHES[name]))
        return int(version)

    applied.record = record_and_stop


def patch_iceberg_commits(module: ModuleType) -> None:
    """Stop before and after the commit to the catalog, which replaces the ledger.

    Also stop between the tasks that write files for it and the request to the catalog.
    """
    commit = module.Commit
    run, send = commit.run, commit._commit_changes

    def run_and_stop(self: Any) -> None:
        name = self.target.location.identifier[-1]
        stop(name, "STAGED", in_batch(self.batch_id))
        run(self)
        stop(name, "COMMITTED", in_batch(self.batch_id))

    def stop_and_send(self: Any, *args: Any) -> Any:
        stop(self.target.location.identifier[-1], "REWRITTEN", in_batch(self.batch_id))
        return send(self, *args)

    commit.run, commit._commit_changes = run_and_stop, stop_and_send


def patch_iceberg_writer(module: ModuleType) -> None:
    writer = module.IcebergWriter
    write = writer.__call__

    def write_and_stop(self: Any, frame: Any, batch_id: int) -> None:
        write(self, frame, batch_id)
        stop(self.target.location.identifier[-1], "COMMITTED", in_batch(batch_id))

    writer.__call__ = write_and_stop


def patch_iceberg_rewriting(module: ModuleType) -> None:
    """Stop in a task after it has written the replacement of a stored file, or its delete file."""
    _patch_results(module.RewriteTask, "EDITED")


def patch_iceberg_moves(module: ModuleType) -> None:
    """Stop in a task after it has written rows that another task has moved out of their files and staged."""
    _patch_results(module.MoveRowsTask, "MOVED")


def _patch_results(task: Any, state: str) -> None:
    result = task.result

    def report_and_stop(self: Any, number: int) -> Any:
        report = result(self, number)
        stop(self.target.table.rpartition(".")[2], state, lambda _: True)
        return report

    task.result = report_and_stop


def from_epoch(number: int) -> Callable[[dict[str, Any]], bool]:
    """Match an epoch, or the first later one that reaches the state."""
    return lambda fault: number >= fault["batch"]


def patch_continuous_tasks(module: ModuleType) -> None:
    """Stop tasks. The source of a case is a queue with its name and `` in``."""
    reading, write_and_stop = module.ReadLoop, module.WriteLoop
    end_reading, end_writing = reading._end_epoch, write_and_stop._end_epoch

    def end_reading_and_stop(self: Any, number: int) -> Any:
        yield from end_reading(self, number)
        stop(self._source._source.queue.name.removesuffix(" in"), "MARKER", from_epoch(number))

    def end_writing_and_stop(self: Any, number: int) -> None:
        end_writing(self, number)
        stop(_case(self._writer._sink), "REPORTED", from_epoch(number))

    reading._end_epoch, write_and_stop._end_epoch = end_reading_and_stop, end_writing_and_stop


def _case(sink: Any) -> str:
    """Return the case of a sink, which is a queue or a table with its name."""
    encoder = getattr(sink, "_encoder", None)
    return str(sink._segments.queue.name if encoder is None else encoder.layout.name.table)


def patch_continuous_queues(module: ModuleType) -> None:
    for kind in (module.QueueStagingWriter, module.QueueWriter):
        kind.end = _patch_end(kind.end)
    _patch_driver_commit(module.QueueSinkDriver, lambda driver: str(driver.options.queue))


def patch_continuous_tables(module: ModuleType) -> None:
    for kind in (module.TableStagingWriter, module.TableInsertWriter):
        kind.end = _patch_end(kind.end)
    _patch_driver_commit(
        module.TableSinkDriver, lambda driver: str(driver._checked_encoder.layout.name.table)
    )


def _patch_end(end: Any) -> Any:
    def end_and_stop(self: Any, epoch: int) -> Any:
        staged = end(self, epoch)
        stop(_case(self), "STAGED", from_epoch(epoch))
        return staged

    return end_and_stop


def _patch_driver_commit(driver: Any, case: Callable[[Any], str]) -> None:
    commit = driver.commit

    def commit_and_stop(self: Any, sink: Any, epoch: Any, offset: Any) -> None:
        commit(self, sink, epoch, offset)
        stop(case(self), "COMMITTED", from_epoch(epoch.number))

    driver.commit = commit_and_stop


def patch_continuous_logs(module: ModuleType) -> None:
    """Stop after log entries. The checkpoint of a case is a folder with its name."""
    logs = module.CheckpointLog
    write_offset, write_commit = logs.write_offset, logs.write_commit

    def write_offset_and_stop(self: Any, number: int, *args: Any, **kwargs: Any) -> None:
        write_offset(self, number, *args, **kwargs)
        stop(Path(self.location).name, "OFFSET", from_epoch(number))

    def write_commit_and_stop(self: Any, number: int) -> None:
        write_commit(self, number)
        stop(Path(self.location).name, "LOGGED", from_epoch(number))

    logs.write_offset, logs.write_commit = write_offset_and_stop, write_commit_and_stop


PATCHES = {
    "penstock.continuous.driver.checkpoint_log": patch_continuous_logs,
    "penstock.continuous.connectors.queue": patch_continuous_queues,
    "penstock.continuous.tasks": patch_continuous_tasks,
    "penstock.tables.continuous": patch_continuous_tables,
    "penstock.commit.owner": patch_owner,
    "penstock.commit.protocol": patch_batch,
    "penstock.spark.queue_writers": patch_queue_writers,
    "penstock.tables.sql.write_task": patch_table_tasks,
    "penstock.tables.delta.stage": patch_delta_tasks,
    "penstock.tables.delta.copy_on_write": patch_copy_on_write,
    "penstock.tables.delta.writer": patch_delta_writer,
    "penstock.tables.delta.applied_table": patch_delta_applied,
    "penstock.tables.iceberg.commit": patch_iceberg_commits,
    "penstock.tables.iceberg.writer": patch_iceberg_writer,
    "penstock.tables.iceberg.rewriting": patch_iceberg_rewriting,
    "penstock.tables.iceberg.moved_rows": patch_iceberg_moves,
}


class Patching(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Importer that patches a module right after its import, before its functions are used."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in PATCHES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        assert spec is not None
        assert spec.loader is not None
        run = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            run(module)
            PATCHES[name](module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]  # of this loader alone
        return spec


if FAULTS:
    sys.meta_path.insert(0, Patching())
