"""SIGTERM stops the running queries gracefully."""

from __future__ import annotations

import logging
import signal
import threading
import weakref
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from types import FrameType

    from penstock.pipeline.query import Query

log = logging.getLogger("penstock.pipeline")

_running: weakref.WeakSet[Query] = weakref.WeakSet()


def stop_on_sigterm(query: Query) -> None:
    """Stop the query when the process is asked to end, unless the program has a handler of its own.

    The first SIGTERM lets each query finish the micro-batch in hand, so that ``awaitTermination`` returns and the program
    ends by itself; the second one ends it at once.
    """
    _running.add(query)
    in_main = threading.current_thread() is threading.main_thread()
    if in_main and signal.getsignal(signal.SIGTERM) == signal.SIG_DFL:
        signal.signal(signal.SIGTERM, _on_sigterm)


def _on_sigterm(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # A thread of its own: the main thread may be in the middle of a call to the JVM.
    threading.Thread(target=_stop_all, name="penstock-shutdown").start()


def _stop_all() -> None:
    # Side by side: each has its own micro-batch to finish.
    for query in list(_running):
        threading.Thread(target=_stop, args=[query], name=f"penstock-shutdown-{query.id}").start()


def _stop(query: Query) -> None:
    called = query.name or query.id
    log.info("stopping query %r", called, extra={"action": "shutdown", "query": called})
    query.stop()
