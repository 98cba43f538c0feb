"""The two ends of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import pyarrow as pa
from pyspark.sql import DataFrame

from penstock.arguments import require
from penstock.errors import InvalidOption
from penstock.queue.checks import check_name

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


@dataclass(frozen=True)
class RateSource:
    """Rows at a steady rate, with ``timestamp`` and ``value``, to try things out.

    Parameters
    ----------
    rows_per_second
        How many.
    partitions
        In how many partitions.
    """

    rows_per_second: int = 1
    partitions: int = 1

    def __post_init__(self) -> None:
        for name in ("rows_per_second", "partitions"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise InvalidOption(f"{name} is a whole number from 1 on, not {value!r}", option=name)

    def given(self) -> dict[str, str]:
        """The options of Spark's rate source."""
        return texts({"rowsPerSecond": self.rows_per_second, "numPartitions": self.partitions})


@dataclass(frozen=True)
class ConsoleSink:
    """The first rows of each micro-batch or epoch, printed on the driver.

    Parameters
    ----------
    rows
        How many.
    truncate
        Whether to cut cells off after 20 characters, or after how many.
    """

    format: ClassVar[str] = "console"
    """What it is for a check of output modes."""
    rows: int = 20
    truncate: bool | int = True

    def given(self) -> dict[str, str]:
        """The options of Spark's console sink."""
        return texts({"numRows": self.rows, "truncate": self.truncate})

    @property
    def width(self) -> int:
        """Characters of a cell; 0 for all."""
        return {True: 20, False: 0}[self.truncate] if isinstance(self.truncate, bool) else self.truncate


@dataclass(frozen=True)
class FunctionSink:
    """A function of one's own, called in the tasks with each ``pyarrow.RecordBatch``, with guarantee ``at_least_once``.

    Parameters
    ----------
    function
        Takes the batch; what it returns is not looked at. Spark pickles it.
    """

    format: ClassVar[str] = "foreachBatch"
    """What it is for a check of output modes."""
    function: Callable[[pa.RecordBatch], object]

    def __call__(self, frame: DataFrame, _batch_id: int) -> None:
        """For ``foreachBatch``."""
        function = self.function

        def each(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            for batch in batches:
                function(batch)
            return iter(())

        frame.mapInArrow(each, "nothing int").collect()


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
