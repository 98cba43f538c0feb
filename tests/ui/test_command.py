"""The command ``penstock ui``."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import httpx
import pytest

import penstock
from tests.support.commands import run_penstock
from tests.support.spark_queues import one_store
from tests.ui.served import events

PROGRAM = [sys.executable, "-m", "penstock", "ui"]


def _failing(*words: object) -> str:
    return run_penstock("ui", *words, code=1).err


@one_store
def test_errors_say_what_to_do(store: penstock.Store, store_url: str, tmp_path: Path) -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as taken:
        port = taken.getsockname()[1]
        assert f"port {port} of 127.0.0.1 is taken" in _failing("--url", store_url, "--port", port)
    tokenless = _failing("--url", store_url, "--host", "0.0.0.0")
    assert "[INVALID_OPTION.MISSING]" in tokenless
    assert "needs a token" in tokenless
    too_short = _failing("--url", store_url, "--token", "short")
    assert "[INVALID_OPTION.VALUE]" in too_short
    assert "at least 16 characters" in too_short
    assert "not an address of this machine" in _failing(
        "--url", store_url, "--host", "192.0.2.1", "--token", "x" * 16
    )
    assert "penstock store init" in _failing("--url", f"sqlite:///{tmp_path}/none.db")
    assert not (tmp_path / "none.db").exists()


@one_store
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_command_prints_the_address_and_stops_on_a_signal(
    store: penstock.Store, store_url: str, number: signal.Signals
) -> None:
    command = [*PROGRAM, "--url", store_url, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as program:
        assert program.stdout is not None
        assert program.stderr is not None
        address = program.stdout.readline().split()[-1]
        assert address.startswith("http://127.0.0.1:")
        with httpx.stream("GET", address + "api/events", timeout=30) as answer:
            found = events(answer.iter_lines())
            next(found)
            program.send_signal(number)
            for _ in found:
                pass
        assert program.wait(20) in (130, -signal.SIGTERM)
        assert program.stderr.read() == ""


@one_store
def test_neither_spark_nor_pandas_is_imported(store: penstock.Store, store_url: str) -> None:
    program = (
        "import sys; from penstock.ui.server import open_server\n"
        f"with open_server({store_url!r}, port=0) as server: server.stream._collector.collect()\n"
        "print([m for m in ('pyspark', 'py4j', 'pandas') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("[]\n", "")


def test_the_error_for_a_missing_extra_says_what_to_install() -> None:
    program = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from penstock.cli import main; sys.exit(main(['ui', '--url', 'sqlite:////tmp/nothing.db']))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert "the page needs fastapi: pip install 'penstock-spark[ui]'" in done.stderr
