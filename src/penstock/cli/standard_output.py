"""Standard output: report failed writes, and wait until its reader goes away."""

from __future__ import annotations

import contextlib
import os
import select
import sys
from collections.abc import Callable, Iterator
from typing import Any, TextIO, cast

from penstock.errors import PenstockError

_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class _CheckedStream:
    """A stream whose failed writes raise OUTPUT_UNWRITABLE, which tells them from the errors of other
    files.
    """

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._failure: PenstockError | None = None

    def write(self, text: str) -> int:
        # typer probes the stream and ignores the error, so raise it again.
        if self._failure is not None:
            raise self._failure
        with self._checked():
            return self._stream.write(text)

    def flush(self) -> None:
        with self._checked():
            self._stream.flush()

    @contextlib.contextmanager
    def _checked(self) -> Iterator[None]:
        try:
            yield
        except BrokenPipeError:
            raise
        except OSError as error:
            silence()
            self._failure = _unwritable(error.strerror or str(error))
            raise self._failure from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def checked() -> Iterator[None]:
    """Raise OUTPUT_UNWRITABLE when standard output is closed or takes no more; let broken pipes through."""
    if sys.stdout is None:
        raise _unwritable("it is closed")
    with contextlib.redirect_stdout(cast("TextIO", _CheckedStream(sys.stdout))):
        yield


def _unwritable(why: str) -> PenstockError:
    return PenstockError(
        f"cannot write to standard output: {why}; send it to another place, such as a file or /dev/null",
        condition="OUTPUT_UNWRITABLE",
    )


def silence() -> None:
    """Redirect standard output to the null device, so that Python reports no second error when it closes
    it.
    """
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_is_closed(seconds: float) -> bool:
    """Wait this long, or until the reader of our pipe goes away; the system reports that without being
    asked.
    """
    poller = select.poll()
    with contextlib.suppress(OSError, ValueError):
        poller.register(sys.stdout.fileno(), 0)
    return bool(poller.poll(seconds * 1000))


def poll_until_closed(shown: Callable[[], int]) -> Iterator[None]:
    """Yield soon after something was shown, and less often while nothing is; end when the output is closed.

    Parameters
    ----------
    shown
        Returns how much has been shown so far.
    """
    pause = _SHORTEST_PAUSE
    while not output_is_closed(pause):
        before = shown()
        yield
        pause = _SHORTEST_PAUSE if shown() > before else min(pause * 2, _LONGEST_PAUSE)
