"""The two ends of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

from penstock.kinds import require
from penstock.queue.names import check_name

_NOTHING: Mapping[str, object] = MappingProxyType({})


@dataclass(frozen=True)
class QueueSource:
    """A queue to read from.

    Parameters
    ----------
    queue
        Its name.
    consumer
        The consumer whose offsets say where the query goes on, and that moves with it.
    url
        The store; by default the session's ``spark.penstock.url``.
    options
        More options of the data source, such as ``{"maxRowsPerTrigger": 100_000}``.
    """

    queue: str
    consumer: str | None = None
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, object] = field(default_factory=lambda: _NOTHING)

    def __post_init__(self) -> None:
        _check(self)
        if self.consumer is not None:
            check_name("consumer", self.consumer)

    def given(self) -> dict[str, str]:
        """The data source's options."""
        named = {"queue": self.queue, "consumer": self.consumer, "url": self.url}
        return texts({**named, **self.options})


@dataclass(frozen=True)
class QueueSink:
    """A queue to write to.

    Parameters
    ----------
    queue
        Its name.
    url
        The store; by default the session's ``spark.penstock.url``.
    options
        More options of the data source, such as ``{"maxRowsPerWrite": 10_000}``.
    """

    format: ClassVar[str] = "penstock"
    """What it is for a check of output modes."""
    queue: str
    url: str | None = field(default=None, repr=False)
    options: Mapping[str, object] = field(default_factory=lambda: _NOTHING)

    def __post_init__(self) -> None:
        _check(self)

    def given(self) -> dict[str, str]:
        """The data source's options."""
        return texts({"queue": self.queue, "url": self.url, **self.options})


def _check(end: QueueSource | QueueSink) -> None:
    check_name("queue", end.queue)
    require("url", end.url, str | None, "the URL of a store, such as 'sqlite:///shop.db'")
    require("options", end.options, Mapping, "a mapping such as {'maxRowsPerTrigger': 100_000}")


def texts(options: Mapping[str, object]) -> dict[str, str]:
    """Options as Spark takes them; those that are None are left out."""
    return {
        name: str(value).lower() if isinstance(value, bool) else str(value)
        for name, value in options.items()
        if value is not None
    }
