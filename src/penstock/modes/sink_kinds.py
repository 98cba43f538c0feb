"""What a sink is, and what the session knows of it (Spark 4.2, 4.3)."""

from __future__ import annotations

from dataclasses import dataclass, field

from pyspark.sql import DataFrame

from penstock.arguments import in_quotes
from penstock.errors import InvalidInput
from penstock.spark.internals.sessions import is_classic
from penstock.spark.internals.sources import Format, look_up

FILES = ("parquet", "json", "csv", "orc", "text", "xml")
DEBUG = ("console", "memory", "noop")
FUNCTIONS = {"foreach": "foreach", "foreachbatch": "foreachBatch"}
_OLDER = (*FILES, "delta", "foreachbatch")
_KNOWN = (*DEBUG, *_OLDER, "foreach", "kafka", "penstock", "penstock table")
READ_IN_SOURCE = ("delta", "kafka")
"""Formats of packages that are known from their source, also where a session does not have them."""


@dataclass(frozen=True)
class Sink:
    """A sink and how Spark sees it."""

    name: str
    format: Format = field(default_factory=Format)
    given: object = None
    """The object, where it is one."""


def sink_of(frame: DataFrame, sink: object) -> Sink | None:
    """The sink that was given: a format's name, ``foreach``, ``foreachBatch``, or an object with a ``format``."""
    if sink is None:
        return None
    given = sink if isinstance(sink, str) else getattr(sink, "format", None)
    if not isinstance(given, str):
        raise InvalidInput(
            f"a sink is a format such as 'parquet', 'foreachBatch', or a ps.QueueSink or ps.TableSink, not {in_quotes(sink)}"
        )
    name = given.lower()
    if name not in _KNOWN:
        return Sink(given, look_up(frame, given) if is_classic(frame) else Format())
    itself = None if isinstance(sink, str) else sink
    missing = look_up(frame, name).missing if name in READ_IN_SOURCE and is_classic(frame) else None
    known = Format(python=name == "penstock", older=name in _OLDER, files=name in FILES, missing=missing)
    return Sink(name, known, itself)
