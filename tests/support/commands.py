"""Runs the command line in this process."""

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
    """Exit code and output of a command."""

    code: int
    out: str
    err: str
    """Standard error, without the link of an error."""
    help: str
    """The link of an error."""

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


def run_penstock(*arguments: object, stdin: bytes | str = b"", code: int = 0) -> Result:
    """Run a command, and check its exit code."""
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", newline="") for _ in range(2))
    data = stdin.encode() if isinstance(stdin, str) else stdin
    with (
        mock.patch.object(sys, "stdin", io.TextIOWrapper(io.BytesIO(data), encoding="utf-8")),
        redirect_stdout(out),
        redirect_stderr(err),
    ):
        exit_code = main([str(argument) for argument in arguments])
    out.flush()
    err.flush()
    texts = [stream.buffer.getvalue().decode() for stream in (out, err)]  # type: ignore[attr-defined]
    message, has_link, link = texts[1].partition("\nhelp: ")
    result = Result(exit_code, texts[0], f"{message}\n" if has_link else message, link.strip())
    assert exit_code == code, f"{arguments} ended with {exit_code}\n{result.out}\n{result.err}"
    return result
