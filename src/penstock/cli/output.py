"""The output of commands: the interface, JSON output, and failures of standard output."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, TextIO, TypeVar, cast

from penstock.errors import PenstockError
from penstock.redaction import redact, secrets_of

Row = Mapping[str, object]
PrintRows = Callable[[Sequence[Row]], None]
"""Prints the next block of rows."""
Advance = Callable[[int], None]
JsonT = TypeVar("JsonT")


# The control characters that json.dumps does not escape.
_CONTROL_CHARACTERS = re.compile("[\x7f-\x9f]")
MAX_CELL_CHARACTERS = 300
"""The maximum number of characters of a text in a list. The names that Penstock accepts are shorter."""


def as_text(value: object) -> str:
    return "" if value is None else str(value)


def as_json_text(value: object) -> str:
    """Return text unchanged, and any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Column:
    """A column of a table: the key of its values, its title, and how values are formatted."""

    key: str
    title: str
    # Each column's function takes the type of its own values.
    text: Callable[[Any], str] = as_text
    right: bool = False


def column_values(described: object, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the attributes of an object that a table shows, by name."""
    return {column.key: getattr(described, column.key) for column in columns}


@dataclass(frozen=True)
class Section:
    """A part of a description: pairs of names and texts, or a table."""

    title: str
    pairs: Sequence[tuple[str, str]] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Row] = ()

    @classmethod
    def of_cells(
        cls,
        title: str,
        titles: Sequence[str],
        lines: Sequence[Sequence[object]],
        *,
        right: Collection[int] = (),
        pairs: Sequence[tuple[str, str]] = (),
    ) -> Section:
        """Return a section with a table whose cells are given by position."""
        columns = [Column(str(index), name, right=index in right) for index, name in enumerate(titles)]
        rows = [{str(index): cell for index, cell in enumerate(line)} for line in lines]
        return cls(title, pairs, columns, rows)


class Output(ABC):
    """Prints results on standard output, and notes, errors and progress on standard error."""

    def __init__(self, url: str) -> None:
        self._secrets = secrets_of(url)

    @abstractmethod
    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Print rows; ``name`` is their key in JSON."""

    @abstractmethod
    def describe(self, data: Mapping[str, object], sections: Sequence[Section]) -> None:
        """Print a description: ``data`` in JSON, ``sections`` in text."""

    @abstractmethod
    def done(self, text: str, data: Mapping[str, object]) -> None:
        """Print the result of a command that changed something."""

    @abstractmethod
    def row_printer(
        self, columns: Sequence[Column], style: Callable[[Row], str] = lambda row: ""
    ) -> PrintRows:
        """Return a function that prints rows as they arrive: whole rows in JSON, ``columns`` in text."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Print a note."""

    @abstractmethod
    def error(self, error: PenstockError) -> None:
        """Print an error in one line."""

    def progress(self, text: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show a progress bar with ``total`` units on a terminal."""
        return nullcontext(lambda units: None)

    def redact(self, text: str) -> str:
        return redact(text, self._secrets)

    def redact_json(self, value: JsonT) -> JsonT:
        """Remove passwords from all texts of a JSON value."""
        redacted: object = value
        if isinstance(value, str):
            redacted = self.redact(value)
        elif isinstance(value, dict):
            redacted = {self.redact(name): self.redact_json(item) for name, item in value.items()}
        elif isinstance(value, list):
            redacted = [self.redact_json(item) for item in value]
        return redacted  # type: ignore[return-value]  # of the same type


def printable(text: str, *, keep: str = "") -> str:
    """Escape characters that would move the cursor or hide text."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else repr(character)[1:-1]
        for character in text
    )


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


class JsonOutput(Output):
    """Output as JSON: a document for each result, JSON lines for rows, one line for an error.

    Keys are never renamed or removed; new keys may be added.
    """

    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        self._print({name: list(rows)})

    def describe(self, data: Mapping[str, object], sections: Sequence[Section]) -> None:
        self._print(data)

    def done(self, text: str, data: Mapping[str, object]) -> None:
        self._print(data)

    def _print(self, value: Mapping[str, object]) -> None:
        print(json_text(value, indent=2))

    def row_printer(
        self, columns: Sequence[Column], style: Callable[[Row], str] = lambda row: ""
    ) -> PrintRows:
        def print_rows(rows: Sequence[Row]) -> None:
            for row in rows:
                print(json_text(row))
            sys.stdout.flush()

        return print_rows

    def note(self, text: str) -> None:
        self._print_error({"note": text})

    def error(self, error: PenstockError) -> None:
        self._print_error(
            {
                "error": error.condition,
                "message": error.message,
                "parameters": error.parameters,
                "help": error.help_url,
            }
        )

    def _print_error(self, value: Mapping[str, object]) -> None:
        # Redact before dumping, so that redaction cannot remove JSON's own quotes.
        print(json_text(self.redact_json(json.loads(json_text(value))), ascii_only=True), file=sys.stderr)


def json_text(value: Mapping[str, object], *, indent: int | None = None, ascii_only: bool = False) -> str:
    """Return JSON without control characters, which a terminal would interpret."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    text = json.dumps(
        value, indent=indent, ensure_ascii=ascii_only or not encoding.startswith("utf"), default=str
    )
    return _CONTROL_CHARACTERS.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_MIN_PAUSE, _MAX_PAUSE = 0.05, 1.0


class _CheckedStream:
    """A stream whose failed writes raise OUTPUT_UNWRITABLE, to distinguish them from other files."""

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
            discard_output()
            self._failure = _output_unwritable(error.strerror or str(error))
            raise self._failure from error

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def checked_output() -> Iterator[None]:
    """Raise OUTPUT_UNWRITABLE if standard output is closed or unwritable; pass broken pipes through."""
    if sys.stdout is None:
        raise _output_unwritable("it is closed")
    with contextlib.redirect_stdout(cast("TextIO", _CheckedStream(sys.stdout))):
        yield


def _output_unwritable(reason: str) -> PenstockError:
    return PenstockError(
        f"cannot write to standard output: {reason}; redirect it, for example to a file or /dev/null",
        condition="OUTPUT_UNWRITABLE",
    )


def discard_output() -> None:
    """Redirect standard output to the null device, so that Python's own flush reports no second error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_is_closed(seconds: float) -> bool:
    """Wait this long, or until the reader closes the pipe; return whether it is closed."""
    poller = select.poll()
    with contextlib.suppress(OSError, ValueError):
        poller.register(sys.stdout.fileno(), 0)
    return bool(poller.poll(seconds * 1000))


def poll_until_closed(count_shown: Callable[[], int]) -> Iterator[None]:
    """Yield repeatedly until the output is closed: soon after something was shown, otherwise less often."""
    pause = _MIN_PAUSE
    while not output_is_closed(pause):
        previous = count_shown()
        yield
        pause = _MIN_PAUSE if count_shown() > previous else min(pause * 2, _MAX_PAUSE)
