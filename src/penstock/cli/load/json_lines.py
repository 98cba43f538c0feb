"""Reading JSON lines: one object in each line."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import TypeVar

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.json
import pyarrow.types as pat

from penstock.arguments import in_quotes
from penstock.arrow.arrays import nested_fields
from penstock.arrow.coerce import DUPLICATE_COLUMN, UNKNOWN_COLUMN, Misfit, match_names
from penstock.arrow.python_rows import to_table
from penstock.cli.load.rows import BlockRefused, Record, RowProblem, not_utf8, shortened, wrong_value
from penstock.cli.load.wire import NOT_FINITE, decode, wire_type

_BLANK_BYTES = b" \t\r"
_THREAD_BYTES = 1 << 20
_STRING = re.compile(rb'"(?:[^"\\]|\\.|(?!))*+"')

Rewrite = Callable[[object], object]
KindT = TypeVar("KindT")


class JsonLines:
    """Reader of rows in JSON lines.

    Rows are read by Arrow's reader. Valid values that it cannot read (maps, names in another case, the text
    "NaN") are first rewritten in Python, line by line. The same applies to every block in which it reports an
    error.
    """

    def __init__(self, schema: pa.Schema) -> None:
        self._schema = schema
        self._wire = pa.schema([(field.name, wire_type(field.type)) for field in schema])
        self._nullable = [field.with_nullable(True) for field in schema]
        self._needs_rewriting = any(_has_map(field) for field in schema)
        self._rewrite = _object_rewriter(list(schema))

    def end_of_rows(self, data: bytes) -> int:
        return data.rfind(b"\n") + 1

    def parse(self, data: bytes) -> pa.Table:
        if self._needs_rewriting:
            raise BlockRefused("Arrow does not read JSON objects as maps")
        table = self.parse_prepared(data)
        infinities = sum(_count_infinities(column.combine_chunks()) for column in table.columns)
        if infinities and infinities != _count_written_infinities(data):
            raise BlockRefused("Arrow reads a number that is too large as an infinity")
        return table

    def parse_or_rewrite(self, data: bytes) -> pa.Table:
        """Parse rows; if this fails, rewrite the rows one by one, and parse the result."""
        try:
            return self.parse(data)
        except BlockRefused:
            prepared = [record.prepared for record in self.records(data)]
        if None in prepared:
            raise BlockRefused("a line is not an object that fits")
        return self.parse_prepared(b"".join(line for line in prepared if line is not None))

    def parse_prepared(self, data: bytes) -> pa.Table:
        rows = _count_objects(data)
        if rows == 0:
            return self._schema.empty_table()
        try:
            if not data.isascii():
                data.decode()
            wire = self._read(data)
            if wire.num_rows != rows:
                raise BlockRefused("a line holds several values")
            arrays = [
                decode(column.combine_chunks(), field.type)
                for column, field in zip(wire.columns, self._schema, strict=True)
            ]
            return to_table(pa.Table.from_arrays(arrays, schema=self._schema), self._schema)
        except (ValueError, pa.ArrowException) as error:
            raise BlockRefused(str(error)) from error

    def _read(self, data: bytes) -> pa.Table:
        """Read the wire types on all cores, unless a row is longer than the block of a thread."""
        try:
            return self._read_blocks(_THREAD_BYTES, data)
        except pa.ArrowInvalid:
            if len(data) <= _THREAD_BYTES:
                raise
            return self._read_blocks(len(data), data)

    def _read_blocks(self, block_size: int, data: bytes) -> pa.Table:
        return pyarrow.json.read_json(
            pa.BufferReader(data),
            read_options=pyarrow.json.ReadOptions(block_size=block_size),
            parse_options=pyarrow.json.ParseOptions(
                explicit_schema=self._schema_of_first_row(data), unexpected_field_behavior="error"
            ),
        )

    def _schema_of_first_row(self, data: bytes) -> pa.Schema:
        """Return the wire types with the names of the first row, which may use another case."""
        try:
            row_names = list(_require_type(dict, _parse_line(data[: data.find(b"\n") + 1] or data)))
            positions = match_names(row_names, self._nullable, "")
        except (ValueError, TypeError, RecursionError, Misfit):
            return self._wire
        names = [
            field.name if position is None else row_names[position]
            for position, field in zip(positions, self._wire, strict=True)
        ]
        return pa.schema([field.with_name(name) for name, field in zip(names, self._wire, strict=True)])

    def records(self, data: bytes) -> list[Record]:
        lines = enumerate(data.split(b"\n"))
        return [self._record(number, line) for number, line in lines if line.strip(_BLANK_BYTES)]

    def _record(self, number: int, line: bytes) -> Record:
        try:
            return Record(number, line, self._prepared(self._rewrite(_parse_line(line))))
        except (ValueError, TypeError, RecursionError, Misfit):
            return Record(number, line, None)

    def _prepared(self, value: object) -> bytes:
        return json.dumps(value).encode() + b"\n"

    def explain(self, record: Record) -> RowProblem:
        try:
            value = _parse_line(record.raw)
        except UnicodeDecodeError as error:
            return not_utf8(error)
        except json.JSONDecodeError as error:
            return RowProblem(f"is not a JSON object in one line: {error.msg} at character {error.pos + 1}")
        except (ValueError, RecursionError) as error:
            return RowProblem(f"cannot be read: {error}")
        if not isinstance(value, dict):
            return RowProblem("is not a JSON object", value=shortened(value))
        try:
            positions = match_names(list(value), list(self._schema), "")
        except Misfit as misfit:
            return _name_problem(misfit)
        values = list(value.values())
        for position, field in zip(positions, self._schema, strict=True):
            problem = None if position is None else self._explain_value(field, values[position])
            if problem is not None:
                return problem
        return RowProblem("does not fit the queue's schema")

    def _explain_value(self, field: pa.Field, value: object) -> RowProblem | None:
        single = JsonLines(pa.schema([field]))
        try:
            single.parse_prepared(single._prepared(single._rewrite({field.name: value})))
        except (BlockRefused, ValueError, TypeError, RecursionError, Misfit) as error:
            return wrong_value(field, value, error)
        return None


def _name_problem(misfit: Misfit) -> RowProblem:
    """Return the problem with a column's name; the reason follows ``column 'idd'``."""
    column = in_quotes(misfit.column)
    reason = misfit.message.rstrip(".")
    if misfit.condition == UNKNOWN_COLUMN:
        reason = "does not exist; " + reason.removeprefix(f"there is no column {column}; ")
    elif misfit.condition == DUPLICATE_COLUMN:
        reason = f"is there twice: {reason}"
    return RowProblem(reason.removeprefix(f"column {column} "), misfit.column, condition=misfit.condition)


def _has_map(field: pa.Field) -> bool:
    return pat.is_map(field.type) or any(_has_map(nested) for nested in nested_fields(field.type))


def _count_infinities(array: pa.Array) -> int:
    """Count infinities at any depth, except in maps, which Arrow does not read."""
    if pat.is_floating(array.type):
        return int(pc.sum(pc.is_inf(array)).as_py() or 0)
    if pat.is_struct(array.type):
        return sum(map(_count_infinities, array.flatten()))
    return _count_infinities(array.flatten()) if pat.is_list(array.type) else 0


def _count_written_infinities(data: bytes) -> int:
    """Count infinities that are written as such, outside of strings."""
    lines = [line for line in data.split(b"\n") if b"nf" in line]
    return _STRING.sub(b"", b"\n".join(lines)).count(b"nf")


def _count_objects(data: bytes) -> int:
    """Count non-blank lines; each must start with an object.

    Arrow's reader treats a line with ``null`` as a row, and crashes if a block has only such lines.
    """
    lines = data.count(b"\n") + (not data.endswith(b"\n"))
    starts = data.startswith(b"{") + data.count(b"\n{")
    if starts == lines:
        return lines
    stripped = [line for line in (line.strip(_BLANK_BYTES) for line in data.split(b"\n")) if line]
    if not all(line.startswith(b"{") for line in stripped):
        raise BlockRefused("a line is not an object")
    return len(stripped)


def _parse_line(line: bytes) -> object:
    value: object = json.loads(line.decode(), object_pairs_hook=_require_unique_keys, parse_float=Decimal)
    return value


def _require_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {in_quotes(repeated)} occurs twice")
    return fields


def _rewriter(kind: pa.DataType) -> Rewrite | None:
    """Return a function that converts parsed values for Arrow's wire type; None if no change is needed."""
    if pat.is_map(kind):
        return _map_rewriter(kind)
    if pat.is_list(kind):
        element = _rewriter(kind.value_type)
        return (
            None
            if element is None
            else lambda values: [_rewrite_optional(element, value) for value in _require_type(list, values)]
        )
    if pat.is_struct(kind):
        return _object_rewriter(list(kind))
    if pat.is_floating(kind):
        return _rewrite_float
    return str if pat.is_decimal(kind) else None


def _rewrite_optional(rewrite: Rewrite | None, value: object) -> object:
    return value if value is None or rewrite is None else rewrite(value)


def _require_type(kind: type[KindT], value: object) -> KindT:
    if not isinstance(value, kind):
        raise TypeError(f"{value!r} is not a {kind.__name__}")
    return value


def _rewrite_float(value: object) -> object:
    if isinstance(value, str):
        return NOT_FINITE.get(value, value)
    if not isinstance(value, Decimal) and type(value) is not int:
        return value
    number = float(Decimal(value))
    if math.isinf(number):
        raise ValueError(f"{value} is too large for 64 bits")
    return number


def _object_rewriter(fields: list[pa.Field]) -> Rewrite:
    rewriters = {field.name: _rewriter(field.type) for field in fields}

    def rewrite(value: object) -> object:
        values = _require_type(dict, value)
        if not values.keys() <= rewriters.keys():
            names = list(values)
            positions = match_names(names, fields, "")
            values = {
                field.name: values[names[position]]
                for field, position in zip(fields, positions, strict=True)
                if position is not None
            }
        return {name: _rewrite_optional(rewriters[name], inner) for name, inner in values.items()}

    return rewrite


def _map_rewriter(kind: pa.DataType) -> Rewrite:
    key_is_text = pat.is_string(wire_type(kind.key_type))
    key, item = _rewriter(kind.key_type), _rewriter(kind.item_type)

    def read_key(text: str) -> object:
        return text if key_is_text else _rewrite_optional(key, json.loads(text, parse_float=Decimal))

    def rewrite(value: object) -> object:
        return [
            {"key": read_key(name), "value": _rewrite_optional(item, inner)}
            for name, inner in _require_type(dict, value).items()
        ]

    return rewrite
