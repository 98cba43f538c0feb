"""What the programs beside this one share: which extras are there, and what is said of the others."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable
from typing import Any

THERE = frozenset(os.environ["PENSTOCK_SMOKE_EXTRAS"].split(","))
_SENTENCE = re.compile(
    r"\[MISSING_DEPENDENCY\] [^\n]* needs [^\n]*: pip install 'penstock-spark\[(\w+)\]'[^\n]*"
)


def needs(extra: str, call: Callable[[], Any]) -> None:
    """Without the extra, the call says in one sentence that it is needed."""
    if extra in THERE:
        return
    try:
        call()
    except ImportError as error:
        found = error
    else:
        raise AssertionError(f"nothing asks for the extra {extra}")
    assert_named(extra, str(found))
    assert type(found).__name__ == "MissingDependencyError", type(found)
    assert not isinstance(found.__cause__, ModuleNotFoundError), "it shows a trace"


def command_needs(extra: str, *words: str) -> None:
    """Without the extra, a command says in one line that it is needed; a second line may link to help."""
    if extra in THERE:
        return
    done = subprocess.run(["penstock", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1, (words, done)
    assert done.stdout == "", done.stdout
    error, *more = done.stderr.removesuffix("\n").split("\n")
    assert error.startswith("error: "), done.stderr
    assert_named(extra, error.removeprefix("error: "))
    # The command line itself lacks a package: it prints no more than that.
    assert [line.partition(": ")[0] for line in more] in (["help"], []), done.stderr


def assert_named(extra: str, text: str) -> None:
    found = _SENTENCE.fullmatch(text)
    assert found is not None, text
    assert found[1] == extra, text


def command(*words: str, given: str | None = None) -> str:
    """Run ``penstock``; what it printed."""
    done = subprocess.run(
        ["penstock", *words], input=given, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, (words, done.stdout, done.stderr)
    return done.stdout
