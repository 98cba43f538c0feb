"""Programs that are forked from a warm process behave as those that are started."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.support.processes import ChildProcess, start
from tests.support.programs import ForkedProgram
from tests.support.waiting import wait_until

SEEN = """
import json, os, signal, sys
print(json.dumps({
    "argv": sys.argv, "path": sys.path, "folder": os.getcwd(), "name": __name__, "file": __file__,
    "environment": dict(os.environ), "orig_argv": sys.orig_argv, "globals": sorted(globals()),
    "stdin": sys.stdin.read(), "main": sys.modules["__main__"].__dict__ is globals(), "umask": os.umask(0),
    "encodings": [f"{stream.encoding} {stream.errors}" for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "buffered": [hasattr(stream.buffer, "raw") for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "lines": [stream.line_buffering for stream in (sys.stdin, sys.stdout, sys.stderr)],
    "signals": [str(signal.getsignal(number)) for number in sorted(signal.valid_signals())],
    "masked": list(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "group": os.getpgid(0),
    "files": sorted(file for file in os.listdir("/dev/fd") if os.path.exists(f"/dev/fd/{file}")),
}))
"""

Program = Callable[..., ChildProcess]


@pytest.fixture
def program(tmp_path: Path, run_child: Program) -> Program:
    """Start a script with this text; it has to be forked."""

    def start_program(text: str, *words: object, **options: object) -> ChildProcess:
        (tmp_path / "program.py").write_text(textwrap.dedent(text))
        child = run_child(tmp_path / "program.py", *words, **options)
        assert isinstance(child.popen, ForkedProgram) is not options.get("fresh", False)
        return child

    return start_program


@pytest.mark.parametrize("way", [["seen.py"], ["-u", "seen.py"], ["-m", "seen"], ["-u", "-m", "seen"]])
def test_a_forked_program_finds_everything_as_a_started_one_does(tmp_path: Path, way: list[str]) -> None:
    (tmp_path / "seen.py").write_text(SEEN)
    environment = {**os.environ, "PENSTOCK_URL": "sqlite:///ż.db"}
    del environment["PYTEST_CURRENT_TEST"]
    command = [sys.executable, *way, "a b", ""]
    seen = []
    for fresh in (True, False):
        log = tmp_path / f"{fresh}.log"
        child = start(command, environment, log, tmp_path, fresh=fresh)
        assert isinstance(child.popen, ForkedProgram) is not fresh
        assert child.wait() == 0, child.output
        seen.append(json.loads(child.output))
        del seen[-1]["environment"]["PENSTOCK_TEST_CHILD"]
    assert seen[1] == seen[0]


@pytest.mark.parametrize(
    ("text", "code", "said"),
    [
        ("print('so'); raise SystemExit", 0, "so\n"),
        ("import sys; sys.exit(7)", 7, ""),
        ("import sys; sys.exit(-1)", 255, ""),
        ("import sys; sys.exit('why')", 1, "why\n"),
        ("1 / 0", 1, "ZeroDivisionError: division by zero\n"),
        ("import os; os._exit(3)", 3, ""),
        ("import os; os.abort()", -signal.SIGABRT, ""),
        ("import atexit; atexit.register(print, 'last')", 0, "last\n"),
        ("import threading; threading.Timer(0.1, print, ['last']).start()", 0, "last\n"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT, "KeyboardInterrupt\n"),
    ],
)
def test_a_forked_program_ends_as_a_started_one_does(
    program: Program, text: str, code: int, said: str
) -> None:
    for fresh in (True, False):
        child = program(text, fresh=fresh)
        assert child.wait() == code
        assert child.output.endswith(said)
        assert bool(child.output) == bool(said)


def test_a_forked_program_can_be_waited_for_with_a_limit(program: Program) -> None:
    child = program("import signal; signal.pause()")
    assert child.returncode is None
    with pytest.raises(subprocess.TimeoutExpired):
        child.popen.wait(0.01)
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait() == child.returncode == -signal.SIGKILL
    child.popen.send_signal(signal.SIGTERM)  # to nobody


GRANDCHILDREN = """
import multiprocessing, os, signal, subprocess, time
subprocess.Popen(["sleep", "600"])
fork, spawn = (multiprocessing.get_context(name) for name in ("fork", "spawn"))
def stay(ready):
    ready.set()
    while True:
        time.sleep(0.01)
if __name__ == "__main__":
    for context in (fork, spawn):
        ready = context.Event()
        context.Process(target=stay, args=[ready]).start()
        ready.wait()
    print("ready", flush=True)
    stay(ready)
"""


def test_processes_of_a_forked_program_are_stopped_continued_and_killed(program: Program) -> None:
    child = program(GRANDCHILDREN)
    child.wait_for_line("ready")
    family = child.processes()
    # It, a fork, a spawned one and that one's helper; the main module starts `sleep`, also in a spawned one.
    assert [process.name() for process in family].count("sleep") == 2
    assert len(family) == 6
    child.stop_tree()
    wait_until(lambda: _statuses(family) == {psutil.STATUS_STOPPED}, message="all are stopped")
    child.continue_tree()
    wait_until(lambda: psutil.STATUS_STOPPED not in _statuses(family), message="all are continued")
    child.kill_tree()
    assert child.returncode == -signal.SIGKILL
    assert not any(_runs(process) for process in family)


def _runs(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE


def _statuses(processes: list[psutil.Process]) -> set[str]:
    return {process.status() for process in processes}


def test_forked_programs_belong_to_one_child_each(program: Program) -> None:
    first, second = (program("import os, signal; os.fork(); signal.pause()") for _ in range(2))
    for child in (first, second):
        wait_until(lambda: len(child.processes()) == 2, message="it has forked")  # noqa: B023
    first.kill_tree()
    assert len(second.processes()) == 2


@pytest.mark.parametrize(
    ("variable", "value", "forked"),
    [
        ("PENSTOCK_URL", "sqlite:///x.db", True),
        ("PENSTOCK_TEST_PAYLOADS", "/nowhere", False),
        ("PYTHONPATH", "/nowhere", False),
        ("PYTHONHASHSEED", "5", False),
        ("TZ", "America/New_York", False),
        ("SPARK_LOCAL_IP", "127.0.0.2", False),
    ],
)
def test_a_program_is_started_if_its_environment_changes_what_is_imported(
    tmp_path: Path, variable: str, value: str, forked: bool
) -> None:
    command = [sys.executable, "-m", "this"]
    child = start(command, {**os.environ, variable: value}, tmp_path / "log")
    child.kill_tree()
    assert isinstance(child.popen, ForkedProgram) is forked


@pytest.mark.parametrize(
    "command",
    [["sleep", "0"], [sys.executable, "-c", ""], [sys.executable, "-I", "-m", "this"], [sys.executable]],
)
def test_other_programs_are_started(tmp_path: Path, command: list[str]) -> None:
    child = start(command, os.environ, tmp_path / "log")
    assert child.wait() == 0
    assert isinstance(child.popen, subprocess.Popen)


def test_forked_programs_end_with_the_process_that_started_them(run_child: Program, tmp_path: Path) -> None:
    script = tmp_path / "tester.py"
    script.write_text(
        textwrap.dedent(
            """
            import os, signal, sys
            from pathlib import Path
            from tests.support import programs
            from tests.support.processes import start
            program = Path(__file__).with_name("program.py")
            program.write_text("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); signal.pause()")
            child = start([sys.executable, str(program)], os.environ, program.with_suffix(".log"))
            child.stop_tree()
            forker = programs._fork_server()
            print("pids", child.pid, forker.process.pid, forker.socket_path, flush=True)
            signal.pause()
            """
        )
    )
    child = run_child(script, fresh=True)
    _, program, forker, where = child.wait_for_line("pids").split()
    processes = [psutil.Process(int(pid)) for pid in (program, forker)]
    assert Path(where).exists()
    os.kill(child.pid, signal.SIGKILL)
    wait_until(
        lambda: not any(_runs(process) for process in processes),
        message="the program and its fork server have exited",
    )
    assert not Path(where).parent.exists()
