"""A reader at a shell, who follows a tutorial.

Lines that set up a folder, a virtual environment or a server are left out: the tests have all three. A
program is run in this process where that saves a Spark session, and by its own interpreter else. Nobody
sleeps: a `sleep` waits for a condition.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import shlex
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil
import pyspark
import pytest

from tests.support.commands import run_penstock
from tests.support.pages import Block, blocks
from tests.support.sparks import short_lived
from tests.support.waiting import wait_until

_SETTING_UP = ("docker ", "python3 -m venv ", "pip install ", "moto_server ", "pkill ")
_OWN_FOLDER = re.compile(r"mkdir [\w-]+ && cd [\w-]+")
_NAMED = re.compile(r"# (\w+\.py)\n")
_PROGRAM = re.compile(r"python (\w+\.py)((?: --?\w+)*)")
_SLEEP = re.compile(r"sleep \d+")
# What differs from run to run.
_CHANGING = [
    (re.compile(r"\d+ skipped, \d+ appended"), "SOME skipped, SOME appended"),
    (re.compile(r"\d+ ms\b"), "SOME ms"),
]


class Reader:
    """Does a page, block by block."""

    def __init__(
        self,
        page: Path,
        folder: Path,
        variables: dict[str, str],
        *,
        ready: Callable[[], bool] = lambda: True,
        here: bool = True,
    ) -> None:
        """
        Parameters
        ----------
        variables
            What the page's exports are in the test.
        ready
            What a `sleep` waits for.
        here
            Whether programs are run in this process, but for sections that kill them.
        """
        self.blocks = blocks(page)
        self.folder, self.variables, self.ready, self.here = folder, variables, ready, here
        self.inside = here
        self.exported: dict[str, str] = {}
        # Spark's log comes there too, as much as it likes.
        self._errors = (folder / ".errors").open("w+")
        programs = _programs(folder / ".bin")
        environment = os.environ | {
            "PATH": os.pathsep.join([str(programs), os.environ["PATH"]]),
            "PYSPARK_PYTHON": sys.executable,
            "SPARK_SUBMIT_OPTS": short_lived(),
            "LC_ALL": "C.UTF-8",
        }
        self.shell = subprocess.Popen(
            ["bash", "-eu", "-o", "pipefail"],
            cwd=folder,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._errors,
            text=True,
        )

    def close(self) -> None:
        """Let the shell end, and with it what it still runs in the background."""
        assert self.shell.stdin is not None
        background = psutil.Process(self.shell.pid).children(recursive=True)
        self.shell.stdin.close()
        self.shell.wait(60)
        for process in background:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        self._errors.close()

    def do(self, monkeypatch: pytest.MonkeyPatch) -> str:
        """Do all of it, compare the end of what each step prints with the page, and return all output."""
        seen, everything = "", ""
        for block in self.blocks:
            self.inside = self.here and not block.alone
            if block.language == "python":
                self._save(block)
            elif block.language == "sh":
                seen = "".join(self._line(line, monkeypatch) for line in block.body.splitlines())
                everything += seen
            elif block.language == "text":
                shown = _settled(block.body)
                assert _settled(seen)[-len(shown) :] == shown, seen
        return everything

    def _save(self, block: Block) -> None:
        named = _NAMED.match(block.body)
        assert named is not None, f"a program of a tutorial begins with its name:\n{block.body}"
        (self.folder / named[1]).write_text(block.body)

    def _line(self, line: str, monkeypatch: pytest.MonkeyPatch) -> str:
        if line.startswith(_SETTING_UP) or _OWN_FOLDER.fullmatch(line):
            return ""
        if line.startswith("export "):
            name = line.removeprefix("export ").partition("=")[0]
            monkeypatch.setenv(name, self.variables[name])
            return self._bash(f"export {name}='{self.variables[name]}'")
        if _SLEEP.fullmatch(line):
            wait_until(self.ready, 240, f"what {line!r} stands for")
            return ""
        program = _PROGRAM.fullmatch(line)
        if program is not None and self.inside:
            return self._program(program[1], program[2].split(), monkeypatch)
        if self.inside and line.startswith("penstock ") and not set(line) & set("|<>&$"):
            with monkeypatch.context() as patch:
                patch.chdir(self.folder)
                return run_penstock(*shlex.split(line)[1:]).out
        return self._bash(line)

    def _program(self, name: str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
        printed = io.StringIO()
        before = set(sys.modules)
        with monkeypatch.context() as patch, contextlib.redirect_stdout(printed):
            patch.chdir(self.folder)
            patch.syspath_prepend(str(self.folder))
            patch.setattr(sys, "argv", [name, *words])
            runpy.run_path(str(self.folder / name), run_name="__main__")
        for module in set(sys.modules) - before:
            if getattr(sys.modules[module], "__file__", None) == str(self.folder / f"{module}.py"):
                del sys.modules[module]
        return printed.getvalue()

    def _bash(self, line: str) -> str:
        """What a line prints; a background job's own output is the page's to redirect."""
        assert self.shell.stdin is not None
        assert self.shell.stdout is not None
        end = f"END {uuid.uuid4().hex}"
        self.shell.stdin.write(f"{line}\necho '{end}'\n")
        self.shell.stdin.flush()
        seen = ""
        for printed in self.shell.stdout:
            if printed.rstrip("\n").endswith(end):
                return seen + printed.rstrip("\n").removesuffix(end)
            seen += printed
        self._errors.seek(0)
        raise AssertionError(f"{line!r} ended the shell:\n{seen}{self._errors.read()}")


def _programs(folder: Path) -> Path:
    """The tests' own `python`, `penstock` and `spark-class`; a signal to one of them reaches it."""
    folder.mkdir()
    spark_home = Path(pyspark.__file__).parent
    commands = {
        "python": f'"{sys.executable}"',
        "penstock": f'"{sys.executable}" -m penstock',
        "spark-class": f'env SPARK_HOME="{spark_home}" "{spark_home}/bin/spark-class"',
    }
    for name, command in commands.items():
        (folder / name).write_text(f'#!/bin/sh\nexec {command} "$@"\n')
        (folder / name).chmod(0o755)
    return folder


def _settled(text: str) -> list[str]:
    for pattern, word in _CHANGING:
        text = pattern.sub(word, text)
    return [line.rstrip() for line in text.rstrip().splitlines()]
