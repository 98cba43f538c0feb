"""The types that events declare for their values, if they contain a schema (``schemas.enable=true``).

The schema has the format of Kafka Connect's JSON converter. Its semantic types are those of Debezium 1.9 to 3
and of Kafka Connect.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import pyarrow as pa
import pyarrow.compute as pc

from penstock.json_text import parse_json

_MAX_DEPTH = 50
_DECIMAL = "org.apache.kafka.connect.data.Decimal"
_COUNTS = {
    "io.debezium.time.Date": "days",
    "io.debezium.time.Timestamp": "millis",
    "io.debezium.time.MicroTimestamp": "micros",
    "io.debezium.time.NanoTimestamp": "nanos",
    "org.apache.kafka.connect.data.Date": "days",
    "org.apache.kafka.connect.data.Timestamp": "millis",
}
_LOCAL_TEXTS = {
    "io.debezium.time.IsoDate": "local date",
    "io.debezium.time.IsoTimestamp": "local time",
}
"""Text that ends with Z although it has no zone (time.precision.mode=isostring)."""
_TIMES = ("io.debezium.time.", "org.apache.kafka.connect.data.Time")
_FORMS = {
    "string": "text",
    "boolean": "boolean",
    "float": "float",
    "double": "double",
    "bytes": "bytes",
    **dict.fromkeys(("int8", "int16", "int32", "int64"), "integer"),
    **dict.fromkeys(("array", "map", "struct"), "nested"),
}


@dataclass(frozen=True)
class Declared:
    """The declared type of a value."""

    type: str
    """The Kafka Connect type, such as ``int64``."""
    name: str = ""
    """The semantic type, such as ``io.debezium.time.MicroTimestamp``."""
    scale: int = 0
    """The scale of a decimal."""
    parts: tuple[tuple[str, Declared], ...] = ()
    """The types of a struct's fields by name, of ``items``, or of ``keys`` and ``values``."""

    @property
    def form(self) -> str:
        """How the value is encoded; ``days``, ``millis``, ``micros`` and ``nanos`` are counts since 1970."""
        form = _FORMS.get(self.type, "unknown")
        if form == "integer" and (self.name in _COUNTS or self.name.startswith(_TIMES)):
            return _COUNTS.get(self.name, "count")
        if form == "text":
            return _LOCAL_TEXTS.get(self.name, form)
        return "decimal" if form == "bytes" and self.name == _DECIMAL else form

    def __str__(self) -> str:
        if self.form == "decimal":
            return f"a decimal of scale {self.scale}"
        return self.name or self.type


def part_of(declared: Declared | None, name: str) -> Declared | None:
    """Return the declared type of a part; None if it is not declared."""
    return None if declared is None else dict(declared.parts).get(name)


@dataclass(frozen=True)
class Declarations:
    """The types that the events of a batch declare for the columns of one image."""

    schemas: Sequence[Mapping[str, Declared]]
    """The distinct schemas: the declared types by column."""
    schema_index: pa.Array
    """For each event, the index of its schema."""

    @classmethod
    def of(cls, schemas: pa.Array, image: str) -> Declarations:
        # Most events of a topic have the same schema.
        texts = schemas.dictionary_encode(null_encoding="encode")
        distinct = texts.dictionary.to_pylist()
        return cls([{} if text is None else columns(text, image) for text in distinct], texts.indices)

    def by_column(self, name: str) -> list[tuple[Declared | None, pa.Array | None]]:
        """Return the distinct types of a column, each with the mask of its events; None for all events."""
        types = [schema.get(name) for schema in self.schemas]
        distinct = list(dict.fromkeys(types))
        if len(distinct) < 2:
            return [(distinct[0] if distinct else None, None)]
        type_index = pa.array([distinct.index(kind) for kind in types]).take(self.schema_index)
        return [(kind, pc.equal(type_index, place)) for place, kind in enumerate(distinct)]


@lru_cache(maxsize=64)
def columns(text: str, image: str) -> Mapping[str, Declared]:
    """Return the declared types of the columns of an image; none if the schema has another structure."""
    try:
        envelope = declared(parse_json(text))
    except ValueError:
        return {}
    row = part_of(envelope, image)
    return {} if row is None else dict(row.parts)


def declared(schema: object, depth: int = 0) -> Declared | None:
    """Return the type that a schema declares; None if it is not a schema."""
    if not isinstance(schema, dict) or not isinstance(schema.get("type"), str) or depth > _MAX_DEPTH:
        return None
    fields, parameters = schema.get("fields"), schema.get("parameters")
    fields = fields if isinstance(fields, list) else ()
    parts_by_name = {str(field.get("field")): field for field in fields if isinstance(field, dict)}
    parts_by_name |= {name: schema[name] for name in ("items", "keys", "values") if name in schema}
    parts = ((name, declared(part, depth + 1)) for name, part in parts_by_name.items())
    scale = str(parameters.get("scale", 0)) if isinstance(parameters, dict) else "0"
    return Declared(
        schema["type"],
        str(schema.get("name") or ""),
        int(scale) if scale.lstrip("-").isdecimal() else 0,
        tuple((name, part) for name, part in parts if part is not None),
    )
