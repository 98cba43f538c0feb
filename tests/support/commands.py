"""The command line, run in this process."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from typing import Any
from unittest import mock

from penstock.cli import main


@dataclass(frozen=True)
class Result:
    """How a command ended and what it said."""

    code: int
    out: str
    err: str
    """Without the link of an error."""
    help: str
    """The link."""

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def error(self) -> Any:
        return json.loads(self.err)

    @property
    def lines(self) -> list[Any]:
        return [json.loads(line) for line in self.out.splitlines()]


Penstock = Callable[..., Result]


def run_penstock(*words: object, stdin: bytes | str = b"", code: int = 0) -> Result:
    """Run a command that has to end with the given code."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    data = stdin.encode() if isinstance(stdin, str) else stdin
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        ended = main([str(word) for word in words])
    out.flush()
    err.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    said, found, link = texts[1].partition("\nhelp: ")
    result = Result(ended, texts[0], f"{said}\n" if found else said, link.strip())
    assert ended == code, f"{words} ended with {ended}\n{result.out}\n{result.err}"
    return result
