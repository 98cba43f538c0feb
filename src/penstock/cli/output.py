"""The output of commands: one interface, its JSON form, and standard output with its failures."""

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
_CONTROL = re.compile("[\x7f-\x9f]")
LONGEST_CELL = 300
"""The most characters of a text in a list. The names that Penstock accepts are shorter."""


def as_text(value: object) -> str:
    return "" if value is None else str(value)


def as_json_text(value: object) -> str:
    """Return text as it is, any other value as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


@dataclass(frozen=True)
class Column:
    """A column of a table: the key of its values, its title, and how a value is written."""

    key: str
    title: str
    # Each column's function takes the type of its own values.
    text: Callable[[Any], str] = as_text
    right: bool = False


def values_of(thing: object, columns: Sequence[Column]) -> dict[str, Any]:
    """Return the attributes that a table shows of an object, by their names."""
    return {column.key: getattr(thing, column.key) for column in columns}


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
        """Return a section with a table whose cells are known by their place."""
        columns = [Column(str(place), name, right=place in right) for place, name in enumerate(titles)]
        rows = [{str(place): cell for place, cell in enumerate(line)} for line in lines]
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
        """Print one thing: ``data`` in JSON, its ``sections`` in text."""

    @abstractmethod
    def done(self, text: str, data: Mapping[str, object]) -> None:
        """Print what the command did."""

    @abstractmethod
    def row_printer(
        self, columns: Sequence[Column], style: Callable[[Row], str] = lambda row: ""
    ) -> PrintRows:
        """Return a function that prints rows as they arrive: in JSON whole, in text these columns of them."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Print a remark."""

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
            redacted = {self.redact(name): self.redact_json(inner) for name, inner in value.items()}
        elif isinstance(value, list):
            redacted = [self.redact_json(inner) for inner in value]
        return redacted  # type: ignore[return-value]  # of the same type


def printable(text: str, *, keep: str = "") -> str:
    """Escape characters that would move the cursor or hide something."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else repr(character)[1:-1]
        for character in text
    )


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))


class JsonOutput(Output):
    """One JSON document a result, rows as JSON lines, an error as one line of JSON.

    Keys are never renamed or removed; new ones may be added.
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
        # Redact before dumping, so that a removed password cannot take JSON's own quotes with it.
        print(json_text(self.redact_json(json.loads(json_text(value))), ascii_only=True), file=sys.stderr)


def json_text(value: Mapping[str, object], *, indent: int | None = None, ascii_only: bool = False) -> str:
    """Return a JSON text without control characters, which a terminal would execute."""
    encoding = (getattr(sys.stdout, "encoding", None) or "").lower()
    text = json.dumps(
        value, indent=indent, ensure_ascii=ascii_only or not encoding.startswith("utf"), default=str
    )
    return _CONTROL.sub(lambda match: f"\\u{ord(match[0]):04x}", text)


_SHORTEST_PAUSE, _LONGEST_PAUSE = 0.05, 1.0


class _CheckedStream:
    """A stream whose failed writes raise OUTPUT_UNWRITABLE, unlike those to other files."""

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
    """Redirect standard output to the null device, so that Python's own flush reports no second error."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def output_is_closed(seconds: float) -> bool:
    """Wait this long, or until the reader of our pipe goes away, which the system reports unasked."""
    poller = select.poll()
    with contextlib.suppress(OSError, ValueError):
        poller.register(sys.stdout.fileno(), 0)
    return bool(poller.poll(seconds * 1000))


def poll_until_closed(shown: Callable[[], int]) -> Iterator[None]:
    """Yield soon after something was shown, and less often while nothing is, until the output is closed."""
    pause = _SHORTEST_PAUSE
    while not output_is_closed(pause):
        before = shown()
        yield
        pause = _SHORTEST_PAUSE if shown() > before else min(pause * 2, _LONGEST_PAUSE)
