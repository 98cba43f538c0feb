"""CSV: what is accepted, what is refused, and the reported line."""

from __future__ import annotations

import csv
import io
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.errors import InvalidInputError, SchemaMismatchError
from tests.cli.reading import complaints, read_rows, read_table, rejected, schema_of

ORDERS = "id bigint not null, name string, amount decimal(10,2), tags array<string>"


@pytest.mark.parametrize(
    "text",
    [
        "id,name\n1,x\n2,\n",
        "id,name\n1,x\n2,",
        "id,name\r\n1,x\r\n2,\r\n",
        "\ufeffid,name\n1,x\n2,\n",
        "\n\nid,name\n\n1,x\n\n\n2,\n\n",
        'id,name\n1,"x"\n"2",\n',
        '"id","name"\n1,x\n2,\n',
        "NAME,ID\nx,1\n,2\n",
    ],
)
def test_line_endings_blank_lines_byte_order_marks_order_and_case_do_not_matter(text: str) -> None:
    found = read_rows("id bigint not null, name string, more int", text, format="csv")
    assert found == [{"id": 1, "name": "x", "more": None}, {"id": 2, "name": None, "more": None}]


@pytest.mark.parametrize("text", ["", "\n\n", "id,name\n", "id,name", "id\n", "id,name\n\n\n"])
def test_an_input_without_rows_is_read_as_no_rows(text: str) -> None:
    assert read_rows(ORDERS, text, format="csv") == []


def test_values_get_their_column_types() -> None:
    ddl = (
        "t timestamp, n timestamp_ntz, d date, b binary, m map<int, struct<a: double>>, f float, g double, "
        "i tinyint, "
        "o time, p interval day to second, x decimal(10,2), y boolean, l array<string>"
    )
    row = {
        "t": "2024-01-01T02:00:00.5+02:00",
        "n": "2024-01-01 00:00:00",
        "d": "2024-02-29",
        "b": "AP8=",
        "m": '{"1": {"A": "NaN"}, "-2": null}',
        "f": "0.5",
        "g": "-inf",
        "i": "-128",
        "o": "12:34:56.789",
        "p": "-5",
        "x": "12.5",
        "y": "true",
        "l": '["a,b",\n"c"]',
    }
    out = io.StringIO()
    writer = csv.DictWriter(out, row)
    writer.writeheader()
    writer.writerow(row)
    assert read_rows(ddl, out.getvalue(), format="csv") == [
        {
            "t": "2024-01-01T00:00:00.500000Z",
            "n": "2024-01-01T00:00:00.000000",
            "d": "2024-02-29",
            "b": "AP8=",
            "m": {"1": {"a": "NaN"}, "-2": None},
            "f": 0.5,
            "g": "-Infinity",
            "i": -128,
            "o": "12:34:56.789000",
            "p": -5,
            "x": "12.50",
            "y": True,
            "l": ["a,b", "c"],
        }
    ]


def test_an_empty_field_is_null_and_a_quoted_one_is_empty_text() -> None:
    assert read_rows("a string, b string", 'a,b\n,""\n""," "\n', format="csv") == [
        {"a": None, "b": ""},
        {"a": "", "b": " "},
    ]


@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("block_bytes", [1, 3, 1 << 20])
@pytest.mark.parametrize("last", [True, False])
def test_in_a_single_column_an_empty_line_is_a_null(end: str, block_bytes: int, last: bool) -> None:
    values: list[str | None] = [None, "x", None, None, "", "y", None, "z"]
    lines = ["" if value is None else value or '""' for value in values]
    text = end.join(["", "a", *lines, *([""] if last else [])])
    found = read_rows("a string, b int", text, format="csv", block_bytes=block_bytes)
    assert found == [{"a": value, "b": None} for value in values]
    assert read_rows("a int", f"a{end}{end}{end}", format="csv", block_bytes=block_bytes) == [{"a": None}] * 2


def test_an_empty_line_is_refused_in_a_column_without_nulls() -> None:
    said = complaints("a int not null", "a\n1\n\n\n2\nx\n", format="csv")
    assert said == [
        "line 3: column 'a' takes no nulls",
        "line 4: column 'a' takes no nulls",
        "line 6: column 'a': \"x\" is not a valid int",
    ]


def test_other_nulls_and_delimiters_can_be_given() -> None:
    found = read_rows("a int, b string", 'a;b\nNA;NA\n;"NA"\n', format="csv", delimiter=";", nulls=("", "NA"))
    assert found == [{"a": None, "b": None}, {"a": None, "b": "NA"}]


@settings(deadline=None)
@given(
    st.lists(
        st.tuples(
            st.integers(-(2**63), 2**63 - 1), st.text(st.characters(exclude_categories=["Cs"]), max_size=8)
        ),
        max_size=20,
    ),
    st.integers(1, 100),
    st.sampled_from(["\n", "\r\n"]),
)
def test_any_text_is_read_unchanged_wherever_blocks_end(
    rows: list[tuple[int, str]], block_bytes: int, end: str
) -> None:
    out = io.StringIO(newline="")
    writer = csv.writer(out, quoting=csv.QUOTE_NONNUMERIC, lineterminator=end)
    writer.writerows([("id", "name"), *rows])
    table = read_table(
        schema_of("id bigint, name string"), out.getvalue(), format="csv", block_bytes=block_bytes
    )
    assert [tuple(row.values()) for row in table.to_pylist()] == rows


def test_each_bad_row_is_reported_with_the_line_it_starts_on() -> None:
    text = "\n".join(
        [
            "id,name,amount,tags",
            '1,"two',
            'lines",1.5,"[""a""]"',
            'x,"two',
            'lines",1,',
            "",
            "2,,1.555,",
            '3,a"b,1,',
            "4,5",
            ",x,1,",
            "7,x,1,{}",
            '8,"x" y,,',
            "9,x,1,[1]",
            "10,ok,,[]",
            '11,"never closed,,',
        ]
    )
    quote = (
        "has a quote that is not around a whole field, or is never closed: quote the whole field and double "
        "the quotes in it"
    )
    assert complaints(ORDERS, text, format="csv", shown_errors=100) == [
        "line 4: column 'id': \"x\" is not a valid bigint",
        "line 7: column 'amount': \"1.555\" is not a valid decimal(10,2)",
        f"line 8: {quote}",
        "line 9: has 2 fields, the header has 4",
        "line 10: column 'id' takes no nulls",
        "line 11: column 'tags': \"{}\" is not a valid array<string>",
        f"line 12: {quote}",
        "line 13: column 'tags': \"[1]\" is not a valid array<string>",
        f"line 15: {quote}",
    ]


@pytest.mark.parametrize(
    ("kind", "text", "said"),
    [
        ("timestamp", "2024-01-01 00:00:00", "it needs a zone"),
        ("timestamp_ntz", "2024-01-01T00:00:00Z", "it takes no zone"),
        ("date", "01/02/2024", "is not a valid date"),
        ("binary", "no base64!", "it is written in base64"),
        ("float", "1e39", "is not a valid float"),
        ("double", "1e400", "is not a valid double"),
        ("int", "2147483648", "is not a valid int"),
        ("int", "1.0", "is not a valid int"),
        ("tinyint", "0xFF", "is not a valid tinyint"),
        ("int", "0X1f", "is not a valid int"),
        ("bigint", '" 0xFF"', "is not a valid bigint"),
        ("interval day to second", "0x10", "is not a valid interval day to second"),
        ("boolean", "yes", "is not a valid boolean"),
        ("decimal(4,2)", "123.4", "is not a valid decimal(4,2)"),
        ("decimal(38,10)", "999999999999999999999999999999", "is not a valid decimal(38,10)"),
        ("decimal(38,10)", "332306998946228968225951765070086144", "is not a valid decimal(38,10)"),
        ("array<int>", '"1} {""a"": 2"', "is not a valid array<int>"),
        ("array<int>", '"1, ""b"": 2"', "is not a valid array<int>"),
        ("struct<x:int not null>", "{}", "takes no nulls"),
    ],
)
def test_an_ambiguous_or_inexact_value_is_refused(kind: str, text: str, said: str) -> None:
    (complaint,) = complaints(f"a {kind}", f"a\n{text}\n", format="csv")
    assert complaint.startswith("line 2: column 'a")
    assert said in complaint


def test_hexadecimal_is_refused_as_a_number_and_accepted_as_text() -> None:
    text = "id,name,n\n1,0xFF,1\n2,0x1,0xFF\n3,,NA\n0x4,,\n"
    said = complaints("id int, name string, n smallint", text, format="csv", nulls=("", "NA"))
    assert said == [
        "line 3: column 'n': \"0xFF\" is not a valid smallint",
        "line 5: column 'id': \"0x4\" is not a valid int",
    ]
    found = read_rows("id int, name string", "id,name\n1,0xFF\n,0x\n", format="csv")
    assert found == [{"id": 1, "name": "0xFF"}, {"id": None, "name": "0x"}]


def test_a_number_that_is_too_large_is_refused_whatever_the_other_fields_say() -> None:
    text = "x,name\n1e999,conf\ninf,a\n-Infinity,b\n1.8e308,inf\n"
    assert complaints("x double, name string", text, format="csv") == [
        "line 2: column 'x': \"1e999\" is not a valid double",
        "line 5: column 'x': \"1.8e308\" is not a valid double",
    ]
    found = read_rows("x double, name string", "x,name\ninf,a\n-Infinity,b\n", format="csv")
    assert [row["x"] for row in found] == ["Infinity", "-Infinity"]
    nested = 'a\n"[1.8e308, ""Infinity""]"\n'
    assert len(complaints("a array<double>", nested, format="csv")) == 1


def test_bytes_that_are_not_utf8_are_refused() -> None:
    (complaint,) = complaints("a string", b"a\nok\n\xff\n", format="csv")
    assert complaint == "line 3: is not UTF-8: byte 1 of the row is 0xff"
    with pytest.raises(InvalidInputError, match="does not start with a CSV header in UTF-8"):
        read_rows("a string", b"\xff\nok\n", format="csv")


@pytest.mark.parametrize(
    ("header", "said", "problem"),
    [
        (
            "id,nam",
            "there is no column 'nam'; the columns are id, name, amount, tags. Did you mean 'name'?",
            "UNKNOWN_COLUMN",
        ),
        ("1,x", "the first line of a CSV names the columns", "UNKNOWN_COLUMN"),
        ("name", "column 'id' is missing and takes no nulls", "MISSING_COLUMN"),
        ("id,ID", "both match column 'id'", "DUPLICATE_COLUMN"),
        ("id,", "there is no column ''", "UNKNOWN_COLUMN"),
    ],
)
def test_a_header_that_does_not_match_is_refused(header: str, said: str, problem: str) -> None:
    with pytest.raises(SchemaMismatchError, match=re.escape(said)) as refused:
        read_rows(ORDERS, f"{header}\n1,2\n", format="csv")
    assert refused.value.condition == f"SCHEMA_MISMATCH.{problem}"


def test_an_unclosed_quote_does_not_consume_the_rest() -> None:
    lines = ["id,name", *(f"{number},x" for number in range(1000))]
    lines[500] = '499,"x'
    error = rejected("id bigint, name string", "\n".join(lines), format="csv", block_bytes=100)
    assert [row["line"] for row in error.parameters["rows"]] == [501]
    assert error.parameters["count"] == 1


def test_a_huge_field_is_read_whatever_the_block_size() -> None:
    giant = "x\n" * 300_000
    text = f'id,name\n1,"{giant}"\n2,y\n'
    found = read_rows("id int, name string", text, format="csv", block_bytes=1000)
    assert [(row["id"], row["name"]) for row in found] == [(1, giant), (2, "y")]


@pytest.mark.parametrize("text", ["a\n" + '"' * 10_001, "a\n" + '"\n' * 5001, 'a\n"' + "x" * 200_000])
def test_malicious_quotes_are_refused_in_reasonable_time(text: str) -> None:
    assert rejected("a string", text, format="csv").parameters["count"] >= 1


def test_the_format_is_detected_from_the_first_character() -> None:
    row: list[dict[str, Any]] = [{"id": 5}]
    assert read_rows("id int", "id\n5\n") == row
    assert read_rows("id int", '\n {"id": 5}\n') == row
    with pytest.raises(InvalidInputError, match=re.escape("write one object in each line")):
        read_rows("id int", json.dumps(row))
    with pytest.raises(InvalidInputError, match="is utf-16, not UTF-8: convert it"):
        read_rows("id int", "id\n5\n".encode("utf-16"))
