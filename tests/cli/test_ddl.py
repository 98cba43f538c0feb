"""Schemas in Spark's DDL, read and written without Spark."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING

import pyarrow as pa
import pyarrow.types as pat
import pytest
from hypothesis import given

from penstock.arrow.schema import canonical_schema, spark_json
from penstock.cli.ddl import parse_ddl, schema_ddl
from penstock.errors import InvalidInputError, UnsupportedTypeError
from tests.support.arrow_strategies import schemas

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

EXAMPLES = [
    "id bigint not null, name string, amount decimal(10,2), tags array<string>",
    "a BOOLEAN, b TINYINT, c byte, d SMALLINT, e short, f INT, g integer, h BIGINT, i long",
    "a float, b real, c double, d date, e binary, f void, g variant",
    "a timestamp, b timestamp_ntz, c timestamp_ltz",
    "a decimal, b dec(5), c numeric(38, 38), d decimal ( 12 , 0 )",
    "a array<array<int>>, b map<string,map<int,array<double>>>, c map < string , int >",
    "s struct<a:int, b: array<string>, c struct<d: date not null, `e f`:binary>>",
    "s struct<a:int not null comment 'inner'> not null comment 'outer'",
    "`order id` bigint, `a``b` string, `ü` int, `größe` double, _x int, `select` int",
    (
        "a string comment 'it''s', b string comment \"a \\\"quoted\\\" one\", c string not null comment "
        "'line\\nbreak'"
    ),
    "a: int, b: string not null",
    "struct<a: int, b: array<string>>",
    "a interval day to second, b interval hour, c interval day, d interval minute to second",
    "a time, b time(6)",
    (
        "date date, timestamp timestamp, map map<string,int>, struct struct<array:int>, interval int, "
        "comment string"
    ),
    "a\tint\n,\r\n  b   string  ",
]


@pytest.mark.parametrize("ddl", EXAMPLES)
def test_ddl_is_parsed_as_spark_parses_it(spark: SparkSession, ddl: str) -> None:
    from pyspark.sql.types import StructType

    assert canonical_schema(parse_ddl(ddl)) == canonical_schema(StructType.fromDDL(ddl))


def test_the_json_form_is_that_of_spark() -> None:
    assert parse_ddl(
        "id bigint not null, s struct<a:array<decimal(5,2)>> comment 'x', m map<int, string>"
    ) == {
        "type": "struct",
        "fields": [
            {"name": "id", "type": "long", "nullable": False, "metadata": {}},
            {
                "name": "s",
                "type": {
                    "type": "struct",
                    "fields": [
                        {
                            "name": "a",
                            "type": {"type": "array", "elementType": "decimal(5,2)", "containsNull": True},
                            "nullable": True,
                            "metadata": {},
                        }
                    ],
                },
                "nullable": True,
                "metadata": {"comment": "x"},
            },
            {
                "name": "m",
                "type": {
                    "type": "map",
                    "keyType": "integer",
                    "valueType": "string",
                    "valueContainsNull": True,
                },
                "nullable": True,
                "metadata": {},
            },
        ],
    }


@pytest.mark.parametrize(
    ("ddl", "said"),
    [
        ("", "character 1: expected a column's name, not the end"),
        ("id", "character 3: expected a type, not the end"),
        ("id bigin", "character 4: expected a type, not 'bigin'. Did you mean 'bigint'?"),
        ("id bigint,", "character 11: expected a column's name"),
        ("id bigint name string", "character 11: expected a comma or the end, not 'name'"),
        ("id bigint not", "character 14: expected 'null', not the end"),
        ("order-id int", "character 6: '-' does not belong here"),
        ("a array<int", "character 12: expected '>', not the end"),
        ("a map<int>", "character 10: expected ',', not '>'"),
        ("a decimal(39,2)", "a decimal has 1 to 38 digits"),
        ("a decimal(4,5)", "a decimal has 1 to 38 digits"),
        ("a decimal(x)", "character 11: expected a number, not 'x'"),
        ("a interval second to day", "interval second to day is not a type"),
        ("a string comment 5", "expected a text in quotes, not '5'"),
        ("a `unclosed", "character 3: '`' does not belong here"),
        ("a int; drop table x", "character 6: ';' does not belong here"),
        ("array<int>", "expected a type, not '<'"),
    ],
)
def test_a_mistake_is_shown_with_its_position(ddl: str, said: str) -> None:
    with pytest.raises(InvalidInputError, match=re.escape(said)) as caught:
        parse_ddl(ddl)
    assert caught.value.condition == "INVALID_SCHEMA"


def test_names_with_letters_of_any_alphabet_need_no_quotes() -> None:
    schema = canonical_schema(parse_ddl("größe int"))
    assert schema.names == ["größe"]
    assert schema_ddl(schema) == ["`größe` int"], "Spark wants the quotes"


@pytest.mark.parametrize("ddl", ["a char(5)", "a varchar(10)", "a interval year", "a interval"])
def test_types_that_no_queue_supports_are_refused_with_an_alternative(ddl: str) -> None:
    with pytest.raises(UnsupportedTypeError, match="use"):
        canonical_schema(parse_ddl(ddl))


def test_excessive_nesting_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(InvalidInputError, match="nested too deeply"):
        parse_ddl("a " + "array<" * 100_000)


def _in_words(kind: pa.DataType) -> pa.DataType:
    """The type without what DDL cannot express: elements and values that must not be null."""
    if pat.is_map(kind):
        return pa.map_(
            pa.field("key", _in_words(kind.key_type), nullable=False),
            pa.field("value", _in_words(kind.item_type)),
        )
    if pat.is_list(kind):
        return pa.list_(pa.field("element", _in_words(kind.value_type)))
    if pat.is_struct(kind):
        return pa.struct([field.with_type(_in_words(field.type)) for field in kind])
    return kind


@given(schemas())
def test_written_ddl_is_read_back_unchanged(schema: pa.Schema) -> None:
    wanted = pa.schema([field.with_type(_in_words(field.type)) for field in schema])
    found = canonical_schema(parse_ddl(", ".join(schema_ddl(schema))))
    assert json.loads(spark_json(found)) == json.loads(spark_json(wanted))
