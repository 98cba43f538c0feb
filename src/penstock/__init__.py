"""Change-data pipelines on PySpark that lose nothing and repeat nothing.

Importing Penstock is light: each name is loaded when it is first used.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from penstock import changes as changes
    from penstock import errors as errors
    from penstock import limits as limits
    from penstock import logs as logs
    from penstock import modes as modes
    from penstock import state as state
    from penstock.changes.debezium import DebeziumFeed as DebeziumFeed
    from penstock.errors import PenstockError as PenstockError
    from penstock.feeds.contract import ChangeContract as ChangeContract
    from penstock.feeds.delta import DeltaFeed as DeltaFeed
    from penstock.feeds.iceberg import IcebergFeed as IcebergFeed
    from penstock.feeds.postgres import PostgresFeed as PostgresFeed
    from penstock.feeds.queue_feed import QueueFeed as QueueFeed
    from penstock.feeds.snapshots import SnapshotFeed as SnapshotFeed
    from penstock.peek.result import TakeResult as TakeResult
    from penstock.peek.sample import take_sample as take_sample
    from penstock.peek.take import take as take
    from penstock.pipeline.continuous import ContinuousQuery as ContinuousQuery
    from penstock.pipeline.monitor import monitor as monitor
    from penstock.pipeline.query import Query as Query
    from penstock.pipeline.query import Trigger as Trigger
    from penstock.pipeline.sinks import ConsoleSink as ConsoleSink
    from penstock.pipeline.sinks import FunctionSink as FunctionSink
    from penstock.pipeline.sinks import QueueSink as QueueSink
    from penstock.pipeline.sources import QueueSource as QueueSource
    from penstock.pipeline.sources import RateSource as RateSource
    from penstock.pipeline.stream import Pipeline as Pipeline
    from penstock.pipeline.stream import Stream as Stream
    from penstock.pipeline.stream import stream as stream
    from penstock.queue.consumer import Consumer as Consumer
    from penstock.queue.consumer import Lag as Lag
    from penstock.queue.consumer import Pull as Pull
    from penstock.queue.maintenance import Retention as Retention
    from penstock.queue.producer import Producer as Producer
    from penstock.queue.queue import AppendResult as AppendResult
    from penstock.queue.queue import Queue as Queue
    from penstock.queue.queue import QueueInfo as QueueInfo
    from penstock.queue.store import Store as Store
    from penstock.queue.store import connect as connect
    from penstock.spark.connectors import BatchSink as BatchSink
    from penstock.spark.connectors import MicroBatch as MicroBatch
    from penstock.spark.connectors import Sink as Sink
    from penstock.spark.connectors import Source as Source
    from penstock.spark.connectors import WriteSettings as WriteSettings
    from penstock.spark.progress_log import log_progress as log_progress
    from penstock.spark.session import register as register
    from penstock.spark.session import session as session
    from penstock.tables.exactly_once import exactly_once as exactly_once
    from penstock.tables.sink import TableSink as TableSink

__version__ = "0.1.0"

_HOMES = {
    "AppendResult": "penstock.queue.queue",
    "BatchSink": "penstock.spark.connectors",
    "ChangeContract": "penstock.feeds.contract",
    "ConsoleSink": "penstock.pipeline.sinks",
    "Consumer": "penstock.queue.consumer",
    "ContinuousQuery": "penstock.pipeline.continuous",
    "FunctionSink": "penstock.pipeline.sinks",
    "Lag": "penstock.queue.consumer",
    "DebeziumFeed": "penstock.changes.debezium",
    "DeltaFeed": "penstock.feeds.delta",
    "IcebergFeed": "penstock.feeds.iceberg",
    "MicroBatch": "penstock.spark.connectors",
    "PenstockError": "penstock.errors",
    "PostgresFeed": "penstock.feeds.postgres",
    "Producer": "penstock.queue.producer",
    "Pull": "penstock.queue.consumer",
    "Pipeline": "penstock.pipeline.stream",
    "Query": "penstock.pipeline.query",
    "Queue": "penstock.queue.queue",
    "QueueFeed": "penstock.feeds.queue_feed",
    "QueueInfo": "penstock.queue.queue",
    "QueueSink": "penstock.pipeline.sinks",
    "QueueSource": "penstock.pipeline.sources",
    "RateSource": "penstock.pipeline.sources",
    "Retention": "penstock.queue.maintenance",
    "Sink": "penstock.spark.connectors",
    "SnapshotFeed": "penstock.feeds.snapshots",
    "Source": "penstock.spark.connectors",
    "Store": "penstock.queue.store",
    "TableSink": "penstock.tables.sink",
    "TakeResult": "penstock.peek.result",
    "Stream": "penstock.pipeline.stream",
    "Trigger": "penstock.pipeline.query",
    "WriteSettings": "penstock.spark.connectors",
    "connect": "penstock.queue.store",
    "exactly_once": "penstock.tables.exactly_once",
    "log_progress": "penstock.spark.progress_log",
    "monitor": "penstock.pipeline.monitor",
    "register": "penstock.spark.session",
    "session": "penstock.spark.session",
    "stream": "penstock.pipeline.stream",
    "take": "penstock.peek.take",
    "take_sample": "penstock.peek.sample",
}

_MODULES = ("changes", "errors", "limits", "logs", "modes", "state")

__all__ = sorted([*_HOMES, *_MODULES, "__version__"])  # noqa: PLE0605 - one list of the names


if not TYPE_CHECKING:
    # A type checker would take any name for one that is there.
    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            from penstock.extras import load

            value = load(_HOMES[name], name, f"penstock.{name}")
            globals()[name] = value
            return value
        if name in _MODULES:
            return import_module(f"penstock.{name}")
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
