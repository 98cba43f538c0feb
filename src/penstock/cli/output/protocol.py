"""What commands say, whichever way it is shown: one interface, with a text and a JSON form."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from penstock.errors import PenstockError
from penstock.redaction import redact as redact
from penstock.redaction import secrets_of as secrets_of

Advance = Callable[[int], None]


def as_text(value: Any) -> str:
    return "" if value is None else str(value)


@dataclass(frozen=True)
class Column:
    """One column of a table: where its values are, what it is called and how they read."""

    key: str
    title: str
    text: Callable[[Any], str] = as_text
    right: bool = False


class RowPrinter(Protocol):
    """Prints rows of a queue, block by block."""

    def __call__(self, partition: int, first_index: int, rows: Sequence[Mapping[str, Any]]) -> None: ...


class ChangePrinter(Protocol):
    """Prints change rows, block by block."""

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> None: ...


class Output(ABC):
    """Where results, notes and errors go. Results go to standard output, all else to standard error.

    Parameters
    ----------
    url
        The store's URL, whose password is struck from everything that is shown.
    """

    def __init__(self, url: str) -> None:
        self._secrets = secrets_of(url)

    @abstractmethod
    def table(self, name: str, columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> None:
        """Show things of one kind; ``name`` is what they are called in JSON."""

    @abstractmethod
    def describe(self, data: Mapping[str, Any], sections: Sequence[Section]) -> None:
        """Show one thing: ``data`` in JSON, its ``sections`` in text."""

    @abstractmethod
    def done(self, text: str, data: Mapping[str, Any]) -> None:
        """Say what was done."""

    @abstractmethod
    def row_printer(self, columns: Sequence[str], *, with_index: bool) -> RowPrinter:
        """Return what shows rows as they come."""

    @abstractmethod
    def change_printer(self, columns: Sequence[str]) -> ChangePrinter:
        """Return what shows change rows as they come, of the data these columns."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Say something beside the result."""

    @abstractmethod
    def error(self, error: PenstockError) -> None:
        """Say what went wrong, in one line."""

    @abstractmethod
    def progress(self, text: str, total: int | None) -> AbstractContextManager[Advance]:
        """Show how far a long step is, in units of ``total``, to people alone."""

    def redact(self, text: str) -> str:
        return redact(text, self._secrets)

    def redacted(self, value: Any) -> Any:
        """A value as JSON has it, with the passwords struck from all of its texts."""
        if isinstance(value, str):
            return self.redact(value)
        if isinstance(value, dict):
            return {self.redact(name): self.redacted(each) for name, each in value.items()}
        return [self.redacted(each) for each in value] if isinstance(value, list) else value


@dataclass(frozen=True)
class Section:
    """A part of a description: pairs of names and texts, or a table."""

    title: str
    pairs: Sequence[tuple[str, str]] = ()
    columns: Sequence[Column] = ()
    rows: Sequence[Mapping[str, Any]] = ()


@contextmanager
def no_progress() -> Iterator[Advance]:
    yield lambda units: None


def printable(text: str, *, keep: str = "") -> str:
    """Return a text with escapes in place of characters that would move the cursor or hide something."""
    if text.isprintable():
        return text
    return "".join(
        character if character.isprintable() or character in keep else repr(character)[1:-1]
        for character in text
    )


def one_line(text: str) -> str:
    return printable(" ".join(text.split()))
