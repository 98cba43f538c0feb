"""Stop a Python process of a Spark application at a state of the commit protocol, for a test to kill it.

Every Python that Spark starts imports this at its start, when this folder is on PYTHONPATH. The variable
FAULTS holds, by the name of a case (its consumer's and its sink's name), the state and micro-batch to stop at
(or to fail at), the checkpoint, and the file that says that it has been reached.
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
        # One process of a case stops, the first one to get here.
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
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, most))


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

    def owning(self: Any, *arguments: Any, **named: Any) -> None:
        init(self, *arguments, **named)
        stop(self.consumer, "OWN", lambda _: True)

    def planning(self: Any, *arguments: Any) -> None:
        plan(self, *arguments)
        stop(self.consumer, "PLANNED", planned)

    def observing(self: Any, *arguments: Any) -> Any:
        stop(self.consumer, "LOGGED", logged)
        found = observe(self, *arguments)
        stop(self.consumer, "SAFE", logged)
        return found

    owner.__init__, owner.plan, owner.observe = owning, planning, observing


def patch_queue_writers(module: ModuleType) -> None:
    _patch_tasks(module)
    _patch_commit(module)


def _patch_tasks(module: ModuleType) -> None:
    writer = module.TaskWriter
    stage, append_once, append = writer.stage, writer.append_once, writer.append

    def staging(self: Any, app_id: str, batch_id: int, batches: Any) -> Any:
        fill_disk(self._queue.name, "FULL_FOR_TASK", batch_id)
        wrote = stage(self, app_id, batch_id, batches)
        if self.task == 0:
            stop(self._queue.name, "HALF", in_batch(batch_id))
        return wrote

    def appending(self: Any, key: Any, *arguments: Any, **more: Any) -> Any:
        fill_disk(self._queue.name, "FULL_FOR_TASK", key.batch_id)
        wrote = append_once(self, key, *arguments, **more)
        if self.task == 0:
            stop(self._queue.name, "HALF", in_batch(key.batch_id))
        return wrote

    def repeating(self: Any, batches: Any) -> Any:
        from penstock.spark.queue_writers import StreamTask

        wrote = append(self, batches)
        if self.task == 0:
            stop(self._queue.name, "HALF", in_batch(StreamTask.current().batch_id))
        return wrote

    write_objects = module.write_objects

    def writing(options: Any, queue: Any, objects: Any, batches: Any) -> Any:
        wrote = write_objects(options, queue, objects, batches)
        if wrote.task == 0:
            stop(queue.name, "HALF", in_batch(module.StreamTask.current().batch_id))
        return wrote

    writer.stage, writer.append_once, writer.append = staging, appending, repeating
    module.write_objects = writing


def patch_batch(module: ModuleType) -> None:
    commit_batch = module.commit_batch

    def committing(database: Any, batch: Any) -> Any:
        stop(batch.sink.name, "STAGED", in_batch(batch.batch_id))
        fill_disk(batch.sink.name, "FULL_FOR_COMMIT", batch.batch_id)
        appended = commit_batch(database, batch)
        stop(batch.sink.name, "COMMITTED", in_batch(batch.batch_id))
        return appended

    module.commit_batch = committing


def _patch_commit(module: ModuleType) -> None:
    """If nothing is committed, stop before and after the call that would commit it."""
    writer = module.QueueStreamWriter
    commit = writer.commit

    def committing(self: Any, messages: Any, batch_id: int) -> None:
        uncommitted = self._options.guarantee == "at_least_once"
        if uncommitted:
            stop(self._queue.name, "STAGED", in_batch(batch_id))
        commit(self, messages, batch_id)
        if uncommitted:
            stop(self._queue.name, "COMMITTED", in_batch(batch_id))

    writer.commit = committing


def patch_table_tasks(module: ModuleType) -> None:
    task = module.StageTask
    put = task.write_rows

    def putting(self: Any, context: Any, batches: Any) -> Any:
        staged = put(self, context, batches)
        if context.partitionId() == 0:
            stop(self.encoder.layout.name.table, "HALF", in_batch(self.stage.batch_id))
        return staged

    task.write_rows = putting


def patch_delta_tasks(module: ModuleType) -> None:
    task = module.DeltaStageTask
    put = task.write_rows

    def putting(self: Any, batches: Any) -> Any:
        from pyspark import TaskContext

        staged = put(self, batches)
        context = TaskContext.get()
        if context is not None and context.partitionId() == 0:
            stop(Path(self.stage.location.path).name, "HALF", in_batch(self.stage.batch_id))
        return staged

    task.write_rows = putting


COMMITTING: dict[str, int] = {}
"""By the name of a case the micro-batch that its Delta table's driver commits."""


def patch_delta_writer(module: ModuleType) -> None:
    """Stop before and after the commit to the table's log, which takes the ledger's place."""
    writer = module.DeltaWriter
    write, commit = writer.__call__, writer._commit

    def committing(self: Any, stage: Any, *arguments: Any) -> None:
        name = Path(self.location.path).name
        COMMITTING[name] = stage.batch_id
        stop(name, "STAGED", in_batch(stage.batch_id))
        commit(self, stage, *arguments)
        stop(name, "COMMITTED", in_batch(stage.batch_id))

    def writing(self: Any, frame: Any, batch_id: int) -> None:
        write(self, frame, batch_id)
        stop(Path(self.location.path).name, "COMMITTED", in_batch(batch_id))

    writer._commit, writer.__call__ = committing, writing


def patch_copy_on_write(module: ModuleType) -> None:
    """Between the tasks that rewrite stored files and the commit that names the new ones."""
    copies = module.CopyOnWrite
    replacement = copies.replacement

    def rewriting(self: Any, *arguments: Any) -> Any:
        rewritten = replacement(self, *arguments)
        stop(Path(self.stage.location.path).name, "REWRITTEN", in_batch(self.stage.batch_id))
        return rewritten

    copies.replacement = rewriting


def patch_delta_applied(module: ModuleType) -> None:
    """Between the commit of what is remembered and that of the table."""
    applied = module.AppliedTable
    record = applied.record

    def remembering(self: Any, *arguments: Any) -> int:
        version = record(self, *arguments)
        name = Path(self.location.path).parents[1].name
        stop(name, "REMEMBERED", in_batch(COMMITTING[name]))
        return int(version)

    applied.record = remembering


def patch_iceberg_commits(module: ModuleType) -> None:
    """Stop before and after the commit to the catalog, which takes the ledger's place, and between the tasks
    that write files for it and the request to the catalog.
    """
    commit = module.Commit
    run, send = commit.run, commit._commit_changes

    def running(self: Any) -> None:
        name = self.target.location.identifier[-1]
        stop(name, "STAGED", in_batch(self.batch_id))
        run(self)
        stop(name, "COMMITTED", in_batch(self.batch_id))

    def sending(self: Any, *arguments: Any) -> Any:
        stop(self.target.location.identifier[-1], "REWRITTEN", in_batch(self.batch_id))
        return send(self, *arguments)

    commit.run, commit._commit_changes = running, sending


def patch_iceberg_writer(module: ModuleType) -> None:
    writer = module.IcebergWriter
    write = writer.__call__

    def writing(self: Any, frame: Any, batch_id: int) -> None:
        write(self, frame, batch_id)
        stop(self.target.location.identifier[-1], "COMMITTED", in_batch(batch_id))

    writer.__call__ = writing


def patch_iceberg_rewriting(module: ModuleType) -> None:
    """In a task, when it has written what becomes of a stored file, with a delete file or without."""
    _patch_results(module.RewriteTask, "EDITED")


def patch_iceberg_moves(module: ModuleType) -> None:
    """In a task, when it has written rows that another one has taken out of their files and staged."""
    _patch_results(module.MoveRowsTask, "MOVED")


def _patch_results(task: Any, state: str) -> None:
    result = task.result

    def reporting(self: Any, number: int) -> Any:
        report = result(self, number)
        stop(self.target.table.rpartition(".")[2], state, lambda _: True)
        return report

    task.result = reporting


def from_epoch(number: int) -> Callable[[dict[str, Any]], bool]:
    """Match an epoch, or the first later one that gets as far."""
    return lambda fault: number >= fault["batch"]


def patch_continuous_tasks(module: ModuleType) -> None:
    """A case's source is a queue with its name and `` in``."""
    reading, writing = module.ReadLoop, module.WriteLoop
    end_reading, end_writing = reading._end_epoch, writing._end_epoch

    def ending_reading(self: Any, number: int) -> Any:
        yield from end_reading(self, number)
        stop(self._source._source.queue.name.removesuffix(" in"), "MARKER", from_epoch(number))

    def ending_writing(self: Any, number: int) -> None:
        end_writing(self, number)
        stop(_case(self._writer._sink), "REPORTED", from_epoch(number))

    reading._end_epoch, writing._end_epoch = ending_reading, ending_writing


def _case(sink: Any) -> str:
    """A case's sink is a queue or a table with its name."""
    encoder = getattr(sink, "_encoder", None)
    return str(sink._segments.queue.name if encoder is None else encoder.layout.name.table)


def patch_continuous_queues(module: ModuleType) -> None:
    for kind in (module.QueueStagingWriter, module.QueueWriter):
        kind.end = _staged(kind.end)
    _committed(module.QueueSinkDriver, lambda driver: str(driver.options.queue))


def patch_continuous_tables(module: ModuleType) -> None:
    for kind in (module.TableStagingWriter, module.TableInsertWriter):
        kind.end = _staged(kind.end)
    _committed(module.TableSinkDriver, lambda driver: str(driver._checked_encoder.layout.name.table))


def _staged(end: Any) -> Any:
    def ending(self: Any, epoch: int) -> Any:
        staged = end(self, epoch)
        stop(_case(self), "STAGED", from_epoch(epoch))
        return staged

    return ending


def _committed(driver: Any, case: Callable[[Any], str]) -> None:
    commit = driver.commit

    def committing(self: Any, sink: Any, epoch: Any, offset: Any) -> None:
        commit(self, sink, epoch, offset)
        stop(case(self), "COMMITTED", from_epoch(epoch.number))

    driver.commit = committing


def patch_continuous_logs(module: ModuleType) -> None:
    """A case's checkpoint is a folder with its name."""
    logs = module.CheckpointLog
    write_offset, write_commit = logs.write_offset, logs.write_commit

    def beginning(self: Any, number: int, *given: Any, **named: Any) -> None:
        write_offset(self, number, *given, **named)
        stop(Path(self.location).name, "OFFSET", from_epoch(number))

    def logging(self: Any, number: int) -> None:
        write_commit(self, number)
        stop(Path(self.location).name, "LOGGED", from_epoch(number))

    logs.write_offset, logs.write_commit = beginning, logging


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
