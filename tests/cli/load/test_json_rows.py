"""JSON lines: what is accepted, what is refused, and the reported line."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
import pyarrow.types as pat
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.arrow.arrays import nested_fields
from penstock.cli.load.load import MAX_COUNTED_ERRORS
from penstock.cli.load.wire import plain_rows
from tests.cli.reading import complaints, read_rows, read_table, rejected, schema_of
from tests.support.arrow_strategies import tables

ORDERS = "id bigint not null, name string, amount decimal(10,2), tags array<string>"


def as_lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _below(field: pa.Field) -> list[pa.Field]:
    return [field, *(each for inner in nested_fields(field.type) for each in _below(inner))]


def _is_beyond_pyarrow(field: pa.Field) -> bool:
    """Whether it is a map that pyarrow cannot cast: with fields that take no nulls, or nothing but nulls,
    below.
    """
    inside = [each for value in nested_fields(field.type)[1:] for each in _below(value)]
    return pat.is_map(field.type) and any(pat.is_null(each.type) or not each.nullable for each in inside)


TABLES = tables().filter(
    lambda found: not any(_is_beyond_pyarrow(each) for field in found[0] for each in _below(field))
)


@settings(deadline=None)
@given(TABLES)
def test_rows_shown_as_json_are_read_back_unchanged(found: tuple[pa.Schema, list[dict[str, Any]]]) -> None:
    schema, rows = found
    table = pa.Table.from_pylist(rows, schema=schema)
    text = as_lines(plain_rows(table))
    assert read_table(schema, text, format="jsonl").equals(table)


@settings(deadline=None)
@given(TABLES, st.integers(0, 8), st.integers(0, 8))
def test_a_slice_of_a_table_is_shown_as_in_the_whole_table(
    found: tuple[pa.Schema, list[dict[str, Any]]], first: int, count: int
) -> None:
    schema, rows = found
    table = pa.Table.from_pylist(rows, schema=schema)
    assert plain_rows(table.slice(first, count)) == plain_rows(table)[first : first + count]


@pytest.mark.parametrize(
    "ddl",
    [
        "array<string>",
        "array<array<date>>",
        "array<map<string, int>>",
        "array<struct<a: array<int>>>",
        "array<void>",
        "map<string, int>",
        "map<date, array<string>>",
        "map<string, map<string, int>>",
        "struct<a: int>",
        "struct<a: array<string>, m: map<int, date>>",
    ],
)
def test_nulls_of_nested_types_are_shown_in_a_slice_of_a_table(ddl: str) -> None:
    rows = [{"id": number} for number in range(30)]
    table = pa.Table.from_pylist(rows, schema=schema_of(f"x {ddl}, id int"))
    assert plain_rows(table.slice(28)) == [{"x": None, "id": 28}, {"x": None, "id": 29}]


@settings(deadline=None)
@given(TABLES, st.integers(1, 200))
def test_rows_do_not_depend_on_where_blocks_end(
    found: tuple[pa.Schema, list[dict[str, Any]]], block_bytes: int
) -> None:
    schema, rows = found
    table = pa.Table.from_pylist(rows, schema=schema)
    text = as_lines(plain_rows(table)).rstrip("\n")
    assert read_table(schema, text, format="jsonl", block_bytes=block_bytes).equals(table)


@pytest.mark.parametrize(
    "text",
    [
        '{"id":1}\n{"id":2}\n',
        '{"id":1}\n{"id":2}',
        '{"id":1}\r\n{"id":2}\r\n',
        '\n\n{"id":1}\n  \n\t\n{"id":2}\n\r\n\n',
        '\ufeff{"id":1}\n{"id":2}\n',
        '  {"id":1}\n\t{"id" : 2 } \n',
        '{"ID":1}\n{"Id":2}\n',
        '{"id":1}\n{"ID":2}\n',
    ],
)
def test_line_endings_blank_lines_byte_order_marks_and_case_do_not_matter(text: str) -> None:
    assert [row["id"] for row in read_rows(ORDERS, text, format="jsonl")] == [1, 2]


@pytest.mark.parametrize("text", ["", "\n", "\ufeff", "  \n\n"])
def test_an_empty_input_has_no_rows(text: str) -> None:
    assert read_rows(ORDERS, text, format="jsonl") == []


def test_values_get_their_column_types() -> None:
    ddl = (
        "t timestamp, n timestamp_ntz, d date, b binary, m map<int, struct<a: date>>, f float, g double, i "
        "tinyint, "
        "v void, o time, p interval day to second, x decimal(38,10), y boolean"
    )
    row = {
        "t": "2024-01-01T02:00:00.5+02:00",
        "n": "2024-01-01 00:00:00",
        "d": "2024-02-29",
        "b": "AP8=",
        "m": {"1": {"a": "0001-01-01"}, "-2": None},
        "f": 0.5,
        "g": "-Infinity",
        "i": -128,
        "v": None,
        "o": "12:34:56.789",
        "p": -5,
        "x": "1234567890123456789012345678.0123456789",
        "y": False,
    }
    assert read_rows(ddl, json.dumps(row), format="jsonl") == [
        {
            **row,
            "t": "2024-01-01T00:00:00.500000Z",
            "n": "2024-01-01T00:00:00.000000",
            "o": "12:34:56.789000",
        }
    ]


def test_decimals_may_be_numbers_and_keep_every_digit() -> None:
    text = '{"x": 1234567890123456789012345678.0123456789}\n{"x": 5}\n{"x": 1e3}'
    found = read_rows("x decimal(38,10)", text, format="jsonl")
    assert [row["x"] for row in found] == [
        "1234567890123456789012345678.0123456789",
        "5.0000000000",
        "1000.0000000000",
    ]
    assert read_rows("x decimal(38,10), m map<string,int>", text, format="jsonl") == [
        {**row, "m": None} for row in found
    ], "also on the way that maps take"


def test_each_bad_row_is_reported_with_its_line_column_value_and_reason() -> None:
    text = "\n".join(
        [
            '{"id": 1}',
            "",
            '{"id": "x"}',
            "null",
            '{"id": 2, "amount": "1.555"}',
            '{"id": 2, "amount": 123456789.5}',
            '{"id": 2, "nam": "x"}',
            '{"id": null}',
            "{",
            '{"name": "a"}',
            '{"id": 1, "id": 2}',
            '{"id": 1, "tags": [1]}',
            "[1]",
            '{"id": 1} {"id": 2}',
            '{"id": 1.5}',
            '{"id": true}',
            '{"id": 9223372036854775808}',
            '{"id": 1, "name": 5}',
            '{"id": 1, "ID": 5}',
        ]
    )
    assert complaints(ORDERS, text, format="jsonl", shown_errors=100) == [
        "line 3: column 'id': \"x\" is not a valid bigint",
        "line 4: null is not a JSON object",
        "line 5: column 'amount': \"1.555\" is not a valid decimal(10,2)",
        "line 6: column 'amount': 123456789.5 is not a valid decimal(10,2)",
        (
            "line 7: [SCHEMA_MISMATCH.UNKNOWN_COLUMN] column 'nam' does not exist; the columns are id, name, "
            "amount, tags. Did you mean 'name'?"
        ),
        "line 8: column 'id' takes no nulls",
        (
            "line 9: is not a JSON object in one line: Expecting property name enclosed in double quotes at "
            "character 2"
        ),
        "line 10: [SCHEMA_MISMATCH.MISSING_COLUMN] column 'id' is missing and takes no nulls: add it",
        "line 11: cannot be read: the key 'id' occurs twice",
        "line 12: column 'tags': [1] is not a valid array<string>",
        "line 13: [1] is not a JSON object",
        "line 14: is not a JSON object in one line: Extra data at character 11",
        "line 15: column 'id': 1.5 is not a valid bigint",
        "line 16: column 'id': true is not a valid bigint",
        "line 17: column 'id': 9223372036854775808 is not a valid bigint",
        "line 18: column 'name': 5 is not a valid string",
        (
            "line 19: [SCHEMA_MISMATCH.DUPLICATE_COLUMN] column 'id' is there twice: 'id' and 'ID' both "
            "match column 'id': drop one of them"
        ),
    ]


@pytest.mark.parametrize(
    ("kind", "value", "said"),
    [
        ("timestamp", '"2024-01-01T00:00:00"', "it needs a zone"),
        ("timestamp", "1700000000", "is not a valid timestamp"),
        ("timestamp", '"2024-02-30T00:00:00Z"', "is not a valid timestamp; there is no day 2024-02-30"),
        ("timestamp_ntz", '"2024-02-30T00:00:00"', "there is no day 2024-02-30"),
        (
            "timestamp",
            '"2024-01-01T25:00:00Z"',
            "is not a valid timestamp; it is written as in 2024-01-31T12:00:00.123456Z",
        ),
        ("timestamp", '"2024-01-01T00:00:00.1234567Z"', "it is written as in"),
        ("timestamp_ntz", '"2024-01-01T00:00:00Z"', "it takes no zone"),
        ("date", "5", "is not a valid date"),
        ("date", '"2024-01-01T00:00:00"', "is not a valid date"),
        ("binary", '"no base64!"', "it is written in base64"),
        ("float", "1e39", "is not a valid float"),
        ("double", "1e400", "is not a valid double"),
        ("double", "1.7976931348623157e309", "is not a valid double"),
        ("double", '"5"', "is not a valid double"),
        ("tinyint", "128", "is not a valid tinyint"),
        # pyarrow's own readers make another number of these.
        ("decimal(38,10)", "999999999999999999999999999999", "is not a valid decimal(38,10)"),
        ("decimal(38,10)", '"332306998946228968225951765070086144"', "is not a valid decimal(38,10)"),
        ("decimal(4,2)", "123.4", "is not a valid decimal(4,2)"),
        ("boolean", "1", "is not a valid boolean"),
        ("string", "true", "is not a valid string"),
        ("time", '"24:00:00"', "is not a valid time"),
        ("interval day to second", "1.5", "it is written in whole microseconds"),
        ("map<string,int>", '[["a", 1]]', "is not a valid map<string, int>"),
        ("map<int,int>", '{"a": 1}', "is not a valid map<int, int>"),
        ("map<string,int>", '{"a": "b"}', "is not a valid map<string, int>"),
        ("struct<a:int>", '{"b": 1}', "is not a valid struct<a: int>"),
        ("struct<a:int not null>", "{}", "takes no nulls"),
        ("array<struct<a:int not null>>", '[{"a": 1}, {"a": null}]', "takes no nulls"),
        ("void", "1", "is not a valid void"),
        ("string", '"\\ud800"', "is not a valid string"),
    ],
)
def test_an_ambiguous_or_inexact_value_is_refused(kind: str, value: str, said: str) -> None:
    (complaint,) = complaints(f"a {kind}", f'{{"a": {value}}}', format="jsonl")
    assert said in complaint
    assert complaint.startswith("line 1: column 'a")


def test_infinities_are_accepted_only_if_written_explicitly() -> None:
    text = '{"a": Infinity}\n{"a": "-Infinity"}\n{"a": "NaN"}\n{"a": NaN}\n{"a": 1e308}'
    found = [row["a"] for row in read_rows("a double", text, format="jsonl")]
    assert found == ["Infinity", "-Infinity", "NaN", "NaN", 1e308]
    (complaint,) = complaints("a double", '{"a": Infinity}\n{"a": 1.7976931348623157e309}', format="jsonl")
    assert complaint.startswith("line 2:")


def test_written_infinities_do_not_hide_a_number_that_is_too_large() -> None:
    text = '{"a": Infinity, "s": "a \\\\"}\n{"a": -Infinity, "s": "\\"Infinity"}\n'
    assert [row["a"] for row in read_rows("a double, s string", text, format="jsonl")] == [
        "Infinity",
        "-Infinity",
    ]
    (complaint,) = complaints("a double, s string", f'{text}{{"a": 1.8e308}}\n', format="jsonl")
    assert complaint.startswith("line 3: column 'a'")
    (complaint,) = complaints("a double", '{"a": Infinity, "a": 1}\n{"a": 1.8e308}', format="jsonl")[:1]
    assert complaint.startswith("line 1:")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("double", "1.8e308"),
        ("double", "9" * 309),
        ("float", "1.8e308"),
        ("array<double>", "[1.8e308]"),
        ("struct<x: array<double>>", '{"x": [1, 1.8e308]}'),
        ("map<string, double>", f'{{"x": {"9" * 309}}}'),
    ],
)
def test_a_number_that_is_too_large_is_refused_at_any_depth(kind: str, value: str) -> None:
    text = f'{{"a": {value}, "note": "conf"}}\n{{"note": "Infinity"}}\n'
    (complaint,) = complaints(f"a {kind}, note string", text, format="jsonl")
    assert complaint.startswith("line 1: column 'a'")


def test_bytes_that_are_not_utf8_are_refused() -> None:
    data = b'{"id": 1, "name": "ok"}\n{"id": 2, "name": "\xff"}\n'
    assert complaints(ORDERS, data, format="jsonl") == ["line 2: is not UTF-8: byte 20 of the row is 0xff"]


@pytest.mark.parametrize(
    "line", ['{"id": 1} {"id": 2}', '{"id": 1}{"id": 2}', '{"id": 1} null', '{"id": 1},', '{"id": 1} x']
)
def test_a_line_must_contain_exactly_one_row(line: str) -> None:
    for text in (line, f'{{"id": 0}}\n{line}\n{{"id": 3}}'):
        (complaint,) = complaints(ORDERS, text, format="jsonl")
        assert "is not a JSON object in one line: Extra data" in complaint


@pytest.mark.parametrize(
    "line", ["null", "null\nnull", "[" * 100_000, '{"id":' + "[" * 100_000, '{"id": 1, "a": ' * 50_000]
)
def test_malicious_lines_are_refused_without_a_crash(line: str) -> None:
    assert rejected(ORDERS, line, format="jsonl").parameters["count"] >= 1


def test_a_long_row_is_read_whatever_the_block_size() -> None:
    name = "x" * 3_000_000
    found = read_rows(
        ORDERS, as_lines([{"id": 1, "name": name}, {"id": 2}]), format="jsonl", block_bytes=1000
    )
    assert [(row["id"], row["name"]) for row in found] == [(1, name), (2, None)]


def test_bad_rows_in_later_blocks_are_reported_with_their_line_in_the_input() -> None:
    rows = [{"id": number} for number in range(5000)]
    lines = as_lines(rows).splitlines()
    lines[1234] = '{"id": "bad"}'
    lines[4999] = '{"id": "worse"}'
    error = rejected(ORDERS, "\n".join(lines), format="jsonl", block_bytes=500)
    assert [(row["line"], row["value"]) for row in error.parameters["rows"]] == [
        (1235, '"bad"'),
        (5000, '"worse"'),
    ]
    assert error.parameters["count"] == 2


def test_bad_rows_are_counted_and_the_first_ones_shown() -> None:
    text = as_lines([{"id": "x" if number % 3 == 0 else number} for number in range(300)])
    error = rejected(ORDERS, text, format="jsonl", shown_errors=2)
    assert error.parameters["count"] == 100
    assert not error.parameters["more"]
    assert [row["line"] for row in error.parameters["rows"]] == [1, 4]
    assert (
        "100 rows of the input do not fit queue 'q' (the first 2 of them are above); nothing was appended"
        in str(error)
    )


def test_the_search_for_bad_rows_stops_at_a_thousand() -> None:
    error = rejected(ORDERS, '{"idx": 1}\n' * (MAX_COUNTED_ERRORS + 1), format="jsonl", block_bytes=2000)
    assert error.parameters["count"] == MAX_COUNTED_ERRORS
    assert error.parameters["more"]
    assert "at least 1,000 rows" in str(error)


def test_the_reader_agrees_with_python_on_random_invalid_input() -> None:
    schema = schema_of("a array<bigint>, s string, o struct<x: double>")
    base = '{"a": [1, 2], "s": "x", "o": {"x": 1.5}}'

    @settings(deadline=None, max_examples=300)
    @given(
        st.integers(0, len(base)),
        st.integers(0, 4),
        st.sampled_from(["", "null", "[", "}", '"', ",", "1", "\\", " "]),
    )
    def check(at: int, end_of_rows: int, put: str) -> None:
        line = base[:at] + put + base[at + end_of_rows :]
        try:
            table = read_table(schema, line, format="jsonl")
        except ValueError:
            return
        assert table.num_rows == (1 if line.strip() else 0)
        for row in plain_rows(table):
            assert {name: value for name, value in row.items() if value is not None} == _without_nulls(
                json.loads(line)
            )

    check()


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    found = {name.lower(): value for name, value in row.items() if value is not None}
    if "o" in found:
        found["o"] = {"x": found["o"].get("x")}
    return found
