"""Tests of streaming queries: rows given micro-batch by micro-batch, what each emits, and crashes where they hurt."""

from penstock.testing.crashes import Crash, crash_at
from penstock.testing.memory import MemoryStream
from penstock.testing.replay import replay_last_batch
from penstock.testing.running import StreamTest, run

__all__ = ["Crash", "MemoryStream", "StreamTest", "crash_at", "replay_last_batch", "run"]
