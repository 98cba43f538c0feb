"""The program itself: how fast it starts, what it imports, and what happens when a pipe is closed."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

import penstock
from penstock.cli.app import warn_of_secrets
from tests.support.commands import run_penstock

PROGRAM = [sys.executable, "-m", "penstock"]


def run(*words: object, **options: object) -> subprocess.CompletedProcess[str]:
    command = [*PROGRAM, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, **options)  # type: ignore[call-overload, no-any-return]  # options of subprocess


def test_the_version_is_shown_without_loading_anything_heavy() -> None:
    done = run("--version")
    assert (done.returncode, done.stdout, done.stderr) == (0, f"penstock {penstock.__version__}\n", "")
    program = (
        "import sys; from penstock.cli import main; main(['--version']); "
        "print([m for m in ('pyarrow', 'numpy', 'pandas', 'pyspark', 'psycopg', 'sqlite3') if m in "
        "sys.modules])"
    )
    loaded = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True
    )
    assert loaded.stdout.splitlines()[1] == "[]"


def test_the_program_starts_fast(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As installed: with the bytecode of its modules.
    monkeypatch.delenv("PYTHONDONTWRITEBYTECODE", raising=False)
    monkeypatch.setenv("PYTHONPYCACHEPREFIX", str(tmp_path))
    commands = [[sys.executable, "-c", "import typer"], [*PROGRAM, "--version"]]
    # Next to typer itself, in turn, so that the machine does not decide.
    taken = [[_seconds(command) for command in commands] for _ in range(7)]
    bare, version = map(min, zip(*taken, strict=True))
    assert version < 3 * bare


def _seconds(command: list[str]) -> float:
    """Return the CPU time of a command."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def test_typical_commands_work_in_a_shell(tmp_path: Path) -> None:
    environment = {**os.environ, "PENSTOCK_URL": f"sqlite:///{tmp_path}/shop.db"}

    def shell(script: str) -> str:
        text = f'set -euo pipefail; penstock() {{ {" ".join(PROGRAM)} "$@"; }}; {script}'
        done = subprocess.run(
            ["bash", "-c", text], capture_output=True, text=True, timeout=120, env=environment
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    shell(
        "penstock store init; penstock queue create orders --schema 'id bigint not null, amount "
        "decimal(10,2)'"
    )
    shell("""echo '{"id": 1, "amount": 9.99}' | penstock queue put orders -""")
    shell("printf 'id,amount\\n2,5\\n3,\\n' | penstock queue put orders --format csv")
    shell("penstock consumer create billing; penstock consumer register billing orders --vital")
    assert json.loads(shell("penstock consumer lag billing --json"))["lags"][0]["rows"] == 3
    assert shell("penstock queue peek orders --json -n 1") == '{"id": 1, "amount": "9.99"}\n'
    shell("penstock queue create copy --schema 'id bigint, amount decimal(12,2)'")
    shell("penstock queue peek orders --json | penstock queue put copy")
    assert "3" in shell("penstock queue list").splitlines()[1]


def test_a_closed_pipe_is_not_an_error(tmp_path: Path) -> None:
    environment = {**os.environ, "PENSTOCK_URL": f"sqlite:///{tmp_path}/shop.db"}
    store = ("--url", environment["PENSTOCK_URL"])
    run_penstock("store", "init", *store)
    run_penstock("queue", "create", "q", "--schema", "id int, name string", *store)
    rows = "".join(f'{{"id": {number}, "name": "{"x" * 100}"}}\n' for number in range(5000))
    run_penstock("queue", "put", "q", *store, stdin=rows)
    for words in ("queue peek q -n 5000 --json", "queue peek q -n 5000"):
        script = f"{' '.join(PROGRAM)} {words} | head -n 1 >/dev/null; echo ${{PIPESTATUS[0]}}"
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment
        )
        assert done.stderr == ""
        assert done.stdout == "141\n"


@pytest.mark.few(4)
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize(
    "words", ["queue list", "queue list --json", "--version", "--help", "queue create q"]
)
def test_an_output_that_cannot_be_written_is_a_one_line_error(
    tmp_path: Path, words: str, unbuffered: str
) -> None:
    environment = {
        **os.environ,
        "PENSTOCK_URL": f"sqlite:///{tmp_path}/shop.db",
        "PYTHONUNBUFFERED": unbuffered,
    }
    run_penstock("store", "init", "--url", environment["PENSTOCK_URL"])
    schema = "--schema 'id int'" if "create" in words else ""
    for where, why in ((">&-", "it is closed"), (">/dev/full", "No space left on device")):
        script = f"{' '.join(PROGRAM)} {words} {schema} {where}"
        done = subprocess.run(
            ["bash", "-c", script], capture_output=True, text=True, timeout=60, env=environment
        )
        said = f"cannot write to standard output: {why}; redirect it, for example to a file or /dev/null"
        page = "https://penstock-spark.github.io/penstock/problems/#output_unwritable"
        assert done.returncode == 1
        if "--json" in words:
            expected = {"error": "OUTPUT_UNWRITABLE", "message": said, "parameters": {}, "help": page}
            assert json.loads(done.stderr) == expected
        else:
            assert done.stderr == f"error: [OUTPUT_UNWRITABLE] {said}\nhelp: {page}\n"


def test_a_closed_standard_error_does_not_put_errors_into_the_results(tmp_path: Path) -> None:
    script = f"{' '.join(PROGRAM)} queue list --url sqlite:///{tmp_path}/no.db 2>&-"
    done = subprocess.run(["bash", "-c", script], stdout=subprocess.PIPE, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (1, "")


def test_characters_missing_from_the_encoding_are_escaped(tmp_path: Path) -> None:
    environment = {**os.environ, "PENSTOCK_URL": f"sqlite:///{tmp_path}/shop.db", "PYTHONIOENCODING": "ascii"}
    run_penstock("store", "init", "--url", environment["PENSTOCK_URL"])
    assert "\\u017c" in run("queue", "create", "\u017cagle", "--schema", "id int", env=environment).stdout
    listed = run("queue", "list", "--json", env=environment)
    assert json.loads(listed.stdout)["queues"][0]["name"] == "\u017cagle"
    assert "\\u017cagle" in run("queue", "list", env=environment).stdout


@pytest.mark.parametrize(
    ("word", "warned"),
    [
        ("queue:q?store=postgresql%3A%2F%2Fme%3AQZ7hush9%40h%2Fd", True),
        ("queue:q?store=postgresql%3A%2F%2Fme%40h%2Fd%3Fpassword%3DQZ7hush9", True),
        ("iceberg:shop.orders?uri=http%3A%2F%2Fme%3AQZ7hush9%40h", True),
        ("iceberg:shop.orders?s3.secret-access-key=QZ7hush9", True),
        ("delta:https%3A%2F%2Fme%3AQZ7hush9%40h/orders", True),
        ("postgresql://me@h/d?sslpassword=QZ%377hush9", True),
        ("postgresql://me:QZ7?hush9@h/d", True),
        ("--url=postgresql://me:QZ7hush9@h/d", True),
        ("queue:q?store=postgresql%3A%2F%2Fme%40h%2Fd%3Fpassword_env%3DSHOP_PASSWORD", False),
        ("postgresql://me@h/d?password_file=/run/secrets/shop", False),
        ("postgresql://me%3Ayou@h/d", False),
        ("snapshots:/data/orders?row_id=secret_key", False),
        ("queue:q?" + "a=?" * 5000, False),
        ("host=h password=QZ7hush9", True),
        ("host=h sslpassword = 'QZ7hush9'", True),
        ("--url=password=QZ7hush9 host=h", True),
        ("host=h user=me passfile=/run/secrets/pgpass", False),
        ("the password of a user", False),
    ],
)
def test_a_password_anywhere_in_a_url_is_warned_about(
    capsys: pytest.CaptureFixture[str], word: str, warned: bool
) -> None:
    warn_of_secrets(["changes", "show", word])
    assert ("every user of this machine can read a password" in capsys.readouterr().err) == warned


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("words", "warned"),
    [
        (("--url", "postgresql://me:QZ7hush9@127.0.0.1:1/db"), "PGPASSFILE"),
        (("--url=postgresql://me@127.0.0.1:1/db?password=QZ7hush9",), "PGPASSFILE"),
        (("--json", "--url", "postgresql://me:QZ7hush9@127.0.0.1:1/db"), "PGPASSFILE"),
        (("--url", "host=127.0.0.1 port=1 password=QZ7hush9"), "PGPASSFILE"),
        (("--url", "postgresql://me@127.0.0.1:1/db"), ""),
        (("--url", "sqlite:////nowhere/x.db"), ""),
    ],
)
def test_a_password_among_the_arguments_is_warned_about(words: tuple[str, ...], warned: str) -> None:
    found = run("queue", "list", *words)
    assert ("every user of this machine can read" in found.stderr) == bool(warned)
    assert warned in found.stderr
    assert "QZ7hush9" not in found.stderr + found.stdout


def test_a_token_among_the_arguments_is_warned_about() -> None:
    found = run("ui", "--url", "sqlite:////nowhere/x.db", "--token", "QZ7hush9QZ7hush9")
    assert "set PENSTOCK_UI_TOKEN instead" in found.stderr
    assert "QZ7hush9" not in found.stderr + found.stdout
