"""Change-data pipelines on PySpark that lose nothing and repeat nothing.

Importing Penstock is light: each name is loaded when it is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from penstock.extras import lazy_names

if TYPE_CHECKING:
    from penstock import changes as changes
    from penstock import errors as errors
    from penstock import limits as limits
    from penstock import logs as logs
    from penstock import modes as modes
    from penstock import state as state
    from penstock.changes.debezium import DebeziumFeed as DebeziumFeed
    from penstock.errors import PenstockError as PenstockError
    from penstock.export.export import ExportStatus as ExportStatus
    from penstock.export.export import QueueExport as QueueExport
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
    from penstock.pump.pump import Pump as Pump
    from penstock.pump.pump import PumpStatus as PumpStatus
    from penstock.queue.append_buffer import AppendBuffer as AppendBuffer
    from penstock.queue.append_buffer import NumberedAppendBuffer as NumberedAppendBuffer
    from penstock.queue.appends import AppendResult as AppendResult
    from penstock.queue.consumer import Consumer as Consumer
    from penstock.queue.consumer import Lag as Lag
    from penstock.queue.consumer import Pull as Pull
    from penstock.queue.maintenance import Retention as Retention
    from penstock.queue.producer import Producer as Producer
    from penstock.queue.queue import Queue as Queue
    from penstock.queue.queue import QueueInfo as QueueInfo
    from penstock.queue.store import Store as Store
    from penstock.queue.store import connect as connect
    from penstock.reconciliation.reconcile import reconcile as reconcile
    from penstock.reconciliation.report import DifferingRange as DifferingRange
    from penstock.reconciliation.report import DifferingRow as DifferingRow
    from penstock.reconciliation.report import Reconciliation as Reconciliation
    from penstock.spark.compaction import compact as compact
    from penstock.spark.connectors import BatchSink as BatchSink
    from penstock.spark.connectors import MicroBatch as MicroBatch
    from penstock.spark.connectors import Sink as Sink
    from penstock.spark.connectors import Source as Source
    from penstock.spark.connectors import WriteSettings as WriteSettings
    from penstock.spark.progress_log import log_progress as log_progress
    from penstock.spark.session import register as register
    from penstock.spark.session import session as session
    from penstock.tables.compaction import TableCompaction as TableCompaction
    from penstock.tables.compaction import compact_table as compact_table
    from penstock.tables.exactly_once import exactly_once as exactly_once
    from penstock.tables.sink import TableSink as TableSink

__version__ = "0.1.0"

_NAMES = {
    "changes.debezium": ["DebeziumFeed"],
    "errors": ["PenstockError"],
    "export.export": ["ExportStatus", "QueueExport"],
    "feeds.contract": ["ChangeContract"],
    "feeds.delta": ["DeltaFeed"],
    "feeds.iceberg": ["IcebergFeed"],
    "feeds.postgres": ["PostgresFeed"],
    "feeds.queue_feed": ["QueueFeed"],
    "feeds.snapshots": ["SnapshotFeed"],
    "peek.result": ["TakeResult"],
    "peek.sample": ["take_sample"],
    "peek.take": ["take"],
    "pipeline.continuous": ["ContinuousQuery"],
    "pipeline.monitor": ["monitor"],
    "pipeline.query": ["Query", "Trigger"],
    "pipeline.sinks": ["ConsoleSink", "FunctionSink", "QueueSink"],
    "pipeline.sources": ["QueueSource", "RateSource"],
    "pipeline.stream": ["Pipeline", "Stream", "stream"],
    "pump.pump": ["Pump", "PumpStatus"],
    "queue.append_buffer": ["AppendBuffer", "NumberedAppendBuffer"],
    "queue.appends": ["AppendResult"],
    "queue.consumer": ["Consumer", "Lag", "Pull"],
    "queue.maintenance": ["Retention"],
    "queue.producer": ["Producer"],
    "queue.queue": ["Queue", "QueueInfo"],
    "queue.store": ["Store", "connect"],
    "reconciliation.reconcile": ["reconcile"],
    "reconciliation.report": ["DifferingRange", "DifferingRow", "Reconciliation"],
    "spark.compaction": ["compact"],
    "spark.connectors": ["BatchSink", "MicroBatch", "Sink", "Source", "WriteSettings"],
    "spark.progress_log": ["log_progress"],
    "spark.session": ["register", "session"],
    "tables.exactly_once": ["exactly_once"],
    "tables.compaction": ["TableCompaction", "compact_table"],
    "tables.sink": ["TableSink"],
}
"""The public names, by the module below ``penstock`` that has them."""
_MODULES = ("changes", "errors", "limits", "logs", "modes", "state")
_HOMES = {name: f"penstock.{module}" for module, names in _NAMES.items() for name in names}
_HOMES |= {module: f"penstock.{module}" for module in _MODULES}

__all__ = sorted([*_HOMES, "__version__"])  # noqa: PLE0605 - one list of the names


if not TYPE_CHECKING:
    # Hidden, so that type checkers report unknown names.
    __getattr__ = lazy_names(__name__, _HOMES)


def __dir__() -> list[str]:
    return __all__
