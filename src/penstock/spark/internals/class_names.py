"""Names of Spark's classes that stand in settings (Spark 4.2, 4.3)."""

from __future__ import annotations

FILE_MANAGER = "org.apache.spark.sql.execution.streaming.checkpointing.FileSystemBasedCheckpointFileManager"
"""Of checkpoints; Spark's own choice runs a process for each link that a path might be, some 30 in a micro-batch."""
ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
"""The state store that transformWithState needs."""
