"""Comparisons in processes of their own: killed during a repair, and with little memory."""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.support.postgres_source import Source
from tests.support.processes import start
from tests.support.reconciled import CopiedTable, copied_table


def begin(made: CopiedTable, folder: Path, number: int, *words: str):  # type: ignore[no-untyped-def]
    source = made.source.feed(tables=[made.table]).url
    command = [sys.executable, "-m", "penstock", "-v", "reconcile", source, made.name, "--url", made.url]
    return start([*command, "--settle", "0", *words], os.environ, folder / f"{number}.log")


@pytest.mark.crash
@pytest.mark.one_kind
def test_a_repair_that_is_killed_is_repeated(source: Source, kind: str, tmp_path: Path) -> None:
    table = source.table("id int PRIMARY KEY, v text", "t")
    source.run(f"INSERT INTO {table} SELECT n, 'v' || n FROM generate_series(1, 30000) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        made.delete("id > 1000")
        made.update("v", "'x'", "id > 500")
        for number in range(2):
            child = begin(made, tmp_path, number, "--repair")
            child.wait_for_line("read again")
            time.sleep(random.Random(number).uniform(0, 1.5))
            os.kill(child.pid, signal.SIGKILL)
            child.wait()
            rows = dict(made.rows("id, v"))
            # No row is torn: each is as it was, or as in the source.
            assert all(value in ("x", f"v{key}") for key, value in rows.items())
        child = begin(made, tmp_path, 9, "--repair")
        assert child.wait() == 0, child.output
        assert made.compare().equal


@pytest.mark.soak
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.one_kind
def test_memory_does_not_grow_with_the_table(source: Source, kind: str, tmp_path: Path, wide: bool) -> None:
    table = source.table("id int PRIMARY KEY, v text", "t")
    value, rows = ("repeat(md5(n::text), 3000)", 3000) if wide else ("repeat(md5(n::text), 5)", 120_000)
    source.run(f"INSERT INTO {table} SELECT n, '' FROM generate_series(1, {rows}) AS n")
    with copied_table(source, table, kind, tmp_path) as made:
        source.run(f"UPDATE {table} SET v = {value.replace('n::', 'id::')}")
        child = begin(made, tmp_path, 0, "--timeout", "0", "-n", "1")
        most = 0
        process = psutil.Process(child.pid)
        while child.returncode is None:
            try:
                most = max(most, process.memory_info().rss)
            except psutil.NoSuchProcess:
                break
            time.sleep(0.02)
        assert child.returncode == 1, child.output
        assert most < 700 << 20
