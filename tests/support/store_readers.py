"""Readers of a store: the Python API, the monitor page and commands.

Each must return a result or raise an error of Penstock. Anything else raises another error here.
"""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Sequence
from pathlib import Path

import penstock
from penstock.cli.app import run as run_command
from penstock.errors import PenstockError
from penstock.ui.metrics import exposition
from penstock.ui.snapshots import Collector, EncodedSnapshot

MAX_PAGE_BYTES = 400_000
"""The maximum size of a snapshot or its metrics, for a store with few rows."""
READ_COMMANDS = (
    ("queue", "list"),
    ("queue", "show", "q"),
    ("queue", "peek", "q"),
    ("queue", "peek", "other", "--json"),
    ("queue", "tail", "q"),
    ("queue", "retention", "q"),
    ("consumer", "list"),
    ("consumer", "lag"),
    ("query", "list"),
    ("pump", "list"),
    ("store", "info"),
)
WRITE_COMMANDS = (
    ("queue", "put", "q", "{rows}"),
    ("queue", "put", "dead", "{rows}"),
    ("queue", "trim", "q", "--before", "5"),
    ("queue", "trim", "other"),
    ("queue", "compact", "q"),
    ("queue", "compact", "other"),
    ("queue", "grow", "q", "--by", "3"),
    ("queue", "add-columns", "other", "more string"),
    ("queue", "widen-columns", "other", "more bigint"),
    ("queue", "retention", "q", "--retention-rows", "7"),
    ("queue", "drop", "other", "--yes", "--force"),
    ("consumer", "seek", "q", "q", "--to", "earliest"),
    ("consumer", "seek", "other", "other", "--to", "2026-01-01T00:00:00Z"),
    ("consumer", "unregister", "q", "q", "--yes"),
    ("consumer", "drop", "other", "--yes"),
    ("store", "clean-up", "--older-than", "1s"),
)
"""Commands that change the store of `mutated_stores`. ``{rows}`` is a file with a JSON row."""


def command(*arguments: str) -> None:
    """Run a command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(arguments)
    if code not in (0, 1) or "UNEXPECTED" in err.getvalue():
        raise AssertionError(f"{arguments} ended with {code}: {err.getvalue()[-2000:]}")


def store_commands(url: str, rows: Path) -> list[Sequence[str]]:
    return [
        [*(part.format(rows=rows) for part in parts), "--url", url]
        for parts in (*READ_COMMANDS, *WRITE_COMMANDS)
    ]


def read_in_python(url: str) -> None:
    with penstock.connect(url, create=False) as store:
        for action in (store.queues, store.consumers, store.registrations, store.info):
            with contextlib.suppress(PenstockError):
                action()
        for name in ("q", "other", "dead", "kept"):
            with contextlib.suppress(PenstockError):
                queue = store.queue(name)
                queue.info()
                for partition in range(min(queue.partitions, 4)):
                    with contextlib.suppress(PenstockError):
                        queue.read(partition, 0, max_rows=1000)
            with contextlib.suppress(PenstockError):
                store.consumer(name).lag(name)
                store.consumer(name).pull(name, 0)


def read_page(url: str, checkpoints: Sequence[str] = (), *, must_answer: bool = False) -> None:
    """Create two snapshots as the server of the page does. With ``must_answer``, they must have no error."""
    collector = Collector(url, checkpoints)
    try:
        for _ in range(2):
            snapshot = collector.collect()
            text = EncodedSnapshot.of(snapshot).text
            json.loads(text, parse_constant=_refuse)
            metrics = exposition(snapshot)
            if max(len(text), len(metrics)) > MAX_PAGE_BYTES:
                raise AssertionError(f"{len(text)} and {len(metrics)} bytes")
            error = snapshot["store"]["error"]
            if "see the log" in str(error) or (must_answer and error is not None):
                raise AssertionError(error)
    finally:
        collector.close()


def _refuse(constant: str) -> None:
    raise AssertionError(constant)
