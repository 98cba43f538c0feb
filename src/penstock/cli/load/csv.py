"""Reading CSV as in RFC 4180: a header with the column names, and quotes only around whole fields.

An empty field is null, and ``""`` is the empty text. If there is only one column, an empty line is a row with
a null; otherwise empty lines are skipped. Numbers are decimal. Nested values are JSON, and binary values
base64. Incorrect quoting is refused, because a wrong guess would swallow the lines up to the next quote.
"""

from __future__ import annotations

import csv
import io
import json
import re
import sys
from collections.abc import Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv
import pyarrow.types as pat

from penstock.arrow.coerce import Misfit, match_names
from penstock.arrow.python_rows import to_table
from penstock.cli.load.json_lines import JsonLines
from penstock.cli.load.rows import BlockRefused, Record, RowProblem, not_utf8, wrong_value
from penstock.cli.load.source import Source
from penstock.cli.load.wire import decode
from penstock.errors import InvalidInputError, SchemaMismatchError

_RECORD = re.compile(rb'[^"\n]*(?:"[^"]*"[^"\n]*)*(?:\n|\Z)')
_HEXADECIMAL = re.compile(rb"0[xX]")
_HEADER_BYTES = 1 << 20


class CsvRows:
    def __init__(
        self, schema: pa.Schema, header: Sequence[str], *, delimiter: str = ",", nulls: Sequence[str] = ("",)
    ) -> None:
        self._schema = schema
        self._fields = _columns(header, schema)
        self._delimiter = delimiter
        self._nulls = list(nulls)
        self._integer_columns = [field.name for field in self._fields if _is_integer_like(field.type)]
        # An empty line is the only way to write the null of a single column.
        self._skips_blank_lines = len(self._fields) > 1
        separator = re.escape(delimiter).encode()
        self._quoted = re.compile(
            rb'(?:(?<=[\n%s])|\A)"[^"]*(?:""[^"]*)*"(?=[\r\n%s]|\Z)' % (separator, separator)
        )

    def end_of_rows(self, data: bytes) -> int:
        # A newline ends a row if the number of quotes before it is even.
        quotes, quotes_after, end = data.count(b'"'), 0, len(data)
        while (newline := data.rfind(b"\n", 0, end)) >= 0:
            quotes_after += data.count(b'"', newline, end)
            if (quotes - quotes_after) % 2 == 0:
                return newline + 1
            end = newline
        return 0

    def parse(self, data: bytes) -> pa.Table:
        return self.parse_prepared(data)

    def parse_prepared(self, data: bytes) -> pa.Table:
        if not data or (self._skips_blank_lines and not data.strip(b"\r\n")):
            return self._schema.empty_table()
        has_quotes = b'"' in data
        if has_quotes and b'"' in self._quoted.sub(b"", data):
            raise BlockRefused("a quote is not around a whole field")
        try:
            self._refuse_hexadecimal(data, has_quotes)
            texts = self._read(data, has_quotes)
            arrays = {
                field.name: _decode_column(column.combine_chunks(), field)
                for field, column in zip(self._fields, texts.columns, strict=True)
            }
            table = to_table(pa.table(arrays), self._schema)
        except (ValueError, pa.ArrowException) as error:
            raise BlockRefused(str(error)) from error
        self._refuse_overflow(table, data, has_quotes)
        return table

    def _refuse_hexadecimal(self, data: bytes, has_quotes: bool) -> None:
        """Refuse hexadecimal integers, which Arrow would read as bits: 0xFF as the tinyint -1."""
        if not self._integer_columns or not _HEXADECIMAL.search(data):
            return
        for column in self._read(data, has_quotes, as_text=self._integer_columns).columns:
            if pc.any(pc.match_substring(column, "0x", ignore_case=True)).as_py():
                raise BlockRefused("an integer is in hexadecimal")

    def _read(self, data: bytes, has_quotes: bool, *, as_text: Sequence[str] = ()) -> pa.Table:
        types = {field.name: _reader_type(field.type) for field in self._fields}
        return pyarrow.csv.read_csv(
            pa.BufferReader(data),
            read_options=pyarrow.csv.ReadOptions(
                column_names=[field.name for field in self._fields],
                block_size=len(data) + 1 if has_quotes else 1 << 20,
            ),
            parse_options=pyarrow.csv.ParseOptions(
                delimiter=self._delimiter,
                newlines_in_values=has_quotes,
                ignore_empty_lines=self._skips_blank_lines,
            ),
            convert_options=pyarrow.csv.ConvertOptions(
                column_types=types | dict.fromkeys(as_text, pa.string()),
                include_columns=list(as_text),
                null_values=self._nulls,
                strings_can_be_null=True,
                quoted_strings_can_be_null=False,
            ),
        )

    def _refuse_overflow(self, table: pa.Table, data: bytes, has_quotes: bool) -> None:
        """Refuse infinities that are not written as such: Arrow reads too large numbers as infinity."""
        floats = [field.name for field in self._fields if pat.is_floating(field.type)]
        infinite = [name for name in floats if pc.any(pc.is_inf(table[name])).as_py()]
        texts = self._read(data, has_quotes, as_text=infinite) if infinite else table
        for name in infinite:
            is_written_infinity = pc.match_substring(texts[name], "nf", ignore_case=True)
            if pc.any(pc.and_not(pc.is_inf(table[name]), is_written_infinity)).as_py():
                raise BlockRefused("a number is too large for 64 bits")

    def records(self, data: bytes) -> list[Record]:
        records, position, line = [], 0, 0
        while position < len(data):
            raw = self._next_record(data, position)
            if raw.strip(b"\r\n") or not self._skips_blank_lines:
                records.append(Record(line, raw, raw))
            position += len(raw)
            line += raw.count(b"\n")
        return records

    def _next_record(self, data: bytes, position: int) -> bytes:
        match = _RECORD.match(data, position)
        if match and b'"' not in self._quoted.sub(b"", match[0]):
            return match[0]
        # A wrong quote affects only its own line, not the lines up to the next quote.
        line = data.find(b"\n", position) + 1
        return data[position:line] if line else data[position:]

    def explain(self, record: Record) -> RowProblem:
        if b'"' in self._quoted.sub(b"", record.raw):
            return RowProblem(
                "has a quote that is not around a whole field, or is never closed: quote the whole "
                "field and double the quotes in it"
            )
        try:
            fields = split_record(record.raw, self._delimiter) or [""]
        except UnicodeDecodeError as error:
            return not_utf8(error)
        except csv.Error as error:
            return RowProblem(f"is not CSV: {error}")
        if len(fields) != len(self._fields):
            return RowProblem(f"has {len(fields)} fields, the header has {len(self._fields)}")
        for field, text in zip(self._fields, fields, strict=True):
            if (problem := self._explain_value(field, text)) is not None:
                return problem
        return RowProblem("does not fit the queue's schema")

    def _explain_value(self, field: pa.Field, text: str) -> RowProblem | None:
        if text in self._nulls:
            return None if field.nullable else RowProblem("takes no nulls", field.name)
        quoted = '"' + text.replace('"', '""') + '"\n'
        single = CsvRows(pa.schema([field]), [field.name], delimiter=self._delimiter, nulls=self._nulls)
        try:
            single.parse_prepared(quoted.encode())
        except BlockRefused as error:
            return wrong_value(field, text, error)
        return None


def _columns(header: Sequence[str], schema: pa.Schema) -> list[pa.Field]:
    try:
        positions = match_names(list(header), list(schema), "")
    except Misfit as misfit:
        error = misfit.error()
        raise SchemaMismatchError(
            f"the header (the first line of a CSV names the columns): {misfit.message}",
            condition=misfit.condition,
            **error.parameters,
        ) from None
    field_by_position = {
        position: field for position, field in zip(positions, schema, strict=True) if position is not None
    }
    return [field_by_position[position] for position in range(len(header))]


def _is_integer_like(kind: pa.DataType) -> bool:
    return bool(pat.is_integer(kind) or pat.is_duration(kind))


def _reader_type(kind: pa.DataType) -> pa.DataType:
    if pat.is_float32(kind):
        return pa.float64()
    is_text = pat.is_binary(kind) or pat.is_nested(kind) or pat.is_decimal(kind)
    return pa.string() if is_text else kind


def _decode_column(array: pa.Array, field: pa.Field) -> pa.Array:
    kind = field.type
    if not pat.is_nested(kind):
        return decode(array, kind)
    prefix = "{" + json.dumps(field.name) + ":"
    texts = pc.coalesce(pc.replace_substring(array, "\n", " "), "null")
    lines = pc.binary_join_element_wise(prefix, texts, "}\n", "")
    data = pc.binary_join(pa.ListArray.from_arrays([0, len(lines)], lines), "")[0].as_py().encode()
    reader = JsonLines(pa.schema([field.with_nullable(True)]))
    return reader.parse_or_rewrite(data).column(0).combine_chunks()


def split_record(raw: bytes, delimiter: str) -> list[str]:
    csv.field_size_limit(sys.maxsize)
    text = raw.decode().rstrip("\r\n")
    return next(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True), [])


def read_header(source: Source, delimiter: str) -> tuple[list[str], int]:
    """Read the first record of the source; return its fields and the number of lines up to its end.

    An empty source has no fields.
    """
    data, blank, match = b"", 0, None
    while not (match and match[0].endswith(b"\n")) and (chunk := source.read(_HEADER_BYTES)):
        data += chunk
        blank = len(data) - len(data.lstrip(b"\r\n"))
        match = _RECORD.match(data, blank)
    end = match.end() if match else len(data)
    source.put_back(data[end:])
    try:
        return split_record(data[blank:end], delimiter), data.count(b"\n", 0, end)
    except (UnicodeDecodeError, csv.Error) as error:
        raise InvalidInputError(
            f"{source.name} does not start with a CSV header in UTF-8: {error}", condition="FILE_UNREADABLE"
        ) from None
