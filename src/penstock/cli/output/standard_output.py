"""Standard output, whose failures are told apart from those of other files."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast

from penstock.errors import PenstockError


class _Checked:
    """A stream whose errors say that it is standard output that takes nothing; all else is the stream's own."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._trouble: PenstockError | None = None

    def write(self, text: str) -> int:
        # Again, since typer first tries what a stream takes, and minds no error.
        if self._trouble is not None:
            raise self._trouble
        with self._told():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._told():
            self._stream.flush()

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence()
            self._trouble = _unwritable(error.strerror or str(error))
            raise self._trouble from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Raise OUTPUT_UNWRITABLE for what is printed in vain, at once where standard output is closed; broken pipes stay so."""
    if sys.stdout is None:
        raise _unwritable("it is closed")
    with contextlib.redirect_stdout(cast("TextIO", _Checked(sys.stdout))):
        yield


def _unwritable(why: str) -> PenstockError:
    return PenstockError(
        f"cannot write to standard output: {why}; send it to another place, such as a file or /dev/null",
        condition="OUTPUT_UNWRITABLE",
    )


def silence() -> None:
    """Let Python write nothing more when it closes standard output: it would complain of what failed before."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
