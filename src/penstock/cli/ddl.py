"""Parsing Spark's DDL, such as ``id bigint not null, tags array<string>``, and writing it.

The grammar is that of ``StructType.fromDDL``: columns separated by commas. A column has a name (in
back-quotes unless it is a plain word), a type, and optionally ``not null`` and ``comment '…'``. Case does not
matter. The parser returns Spark's schema JSON, and does not need Spark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import dataclass

import pyarrow as pa

from penstock.arguments import did_you_mean
from penstock.arrow.schema import spark_json
from penstock.errors import InvalidInputError
from penstock.json_text import Json

_TOKENS = re.compile(
    r"""\s*(?:
        (?P<word>\w+)
      | `(?P<name>(?:[^`]|``)+)`
      | '(?P<text>(?:[^'\\]|\\.|'')*)'
      | "(?P<text2>(?:[^"\\]|\\.|"")*)"
      | (?P<sign>[<>(),:])
      | (?P<end>\Z)
    )""",
    re.VERBOSE | re.DOTALL,
)
_SIMPLE_TYPES = {
    "boolean": "boolean",
    "tinyint": "byte",
    "byte": "byte",
    "smallint": "short",
    "short": "short",
    "int": "integer",
    "integer": "integer",
    "bigint": "long",
    "long": "long",
    "float": "float",
    "real": "float",
    "double": "double",
    "date": "date",
    "timestamp": "timestamp",
    "timestamp_ltz": "timestamp",
    "timestamp_ntz": "timestamp_ntz",
    "binary": "binary",
    "void": "void",
    "variant": "variant",
}
_DECIMALS = ("decimal", "dec", "numeric")
_INTERVAL_UNITS = (("year", "month"), ("day", "hour", "minute", "second"))
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "0": "\0", "b": "\b"}


def parse_ddl(text: str) -> Json:
    """Parse DDL; return the same as ``StructType.fromDDL(text).jsonValue()``."""
    reader = _Reader(text)
    try:
        if reader.peek().word == "struct" and reader.peek(1).sign == "<":
            reader.next()
            schema = reader.struct()
        else:
            schema = {"type": "struct", "fields": reader.fields()}
    except RecursionError:
        raise reader.error("it is nested too deeply") from None
    reader.expect_end()
    return schema


@dataclass(frozen=True)
class _Token:
    start: int
    kind: str
    value: str

    @property
    def word(self) -> str | None:
        return self.value.lower() if self.kind == "word" else None

    @property
    def sign(self) -> str | None:
        return self.value if self.kind == "sign" else None

    def __str__(self) -> str:
        return "the end" if self.kind == "end" else repr(self.value)


class _Reader:
    """Recursive descent parser; each method reads one part of the grammar."""

    def __init__(self, text: str) -> None:
        self._string_literal = text
        self._tokens = self._scan()
        self._next_token = 0

    def _scan(self) -> list[_Token]:
        tokens: list[_Token] = []
        position = 0
        while not tokens or tokens[-1].kind != "end":
            match = _TOKENS.match(self._string_literal, position)
            if match is None:
                start = (
                    position
                    + len(self._string_literal[position:])
                    - len(self._string_literal[position:].lstrip())
                )
                raise self.error(f"{self._string_literal[start]!r} does not belong here", start)
            kind = str(match.lastgroup)
            tokens.append(_Token(match.start(kind), kind, match[kind]))
            position = match.end()
        return tokens

    def error(self, message: str, position: int | None = None) -> InvalidInputError:
        """Return the error at a position, by default at the next token."""
        if position is None:
            position = self.peek().start
        return InvalidInputError(
            f"the schema, at character {position + 1}: {message}",
            condition="INVALID_SCHEMA",
            schema=self._string_literal,
            position=position,
        )

    def peek(self, ahead: int = 0) -> _Token:
        return self._tokens[min(self._next_token + ahead, len(self._tokens) - 1)]

    def next(self) -> _Token:
        token = self.peek()
        self._next_token += 1
        return token

    def _accept(self, value: str) -> bool:
        token = self.peek()
        if token.sign == value or token.word == value:
            self._next_token += 1
            return True
        return False

    def _expect(self, value: str) -> None:
        if not self._accept(value):
            raise self.error(f"expected {value!r}, not {self.peek()}")

    def expect_end(self) -> None:
        if self.peek().kind != "end":
            raise self.error(f"expected a comma or the end, not {self.peek()}; a column is: name type")

    def fields(self) -> list[Json]:
        fields = [self._field()]
        while self._accept(","):
            fields.append(self._field())
        return fields

    def _field(self) -> Json:
        name = self.next()
        if name.kind not in ("word", "name"):
            raise self.error(
                f"expected a column's name, not {name}; put unusual names in back-quotes", name.start
            )
        self._accept(":")
        field = {
            "name": name.value.replace("``", "`") if name.kind == "name" else name.value,
            "type": self.type(),
            "nullable": True,
            "metadata": {},
        }
        while self.peek().word in ("not", "comment"):
            if self.next().word == "not":
                self._expect("null")
                field["nullable"] = False
            else:
                field["metadata"] = {"comment": self._string()}
        return field

    def _string(self) -> str:
        token = self.next()
        if token.kind not in ("text", "text2"):
            raise self.error(f"expected a text in quotes, not {token}", token.start)
        doubled = "''" if token.kind == "text" else '""'
        return re.sub(
            r"\\(.)|" + doubled,
            lambda match: _ESCAPES.get(match[1], match[1]) if match[1] else doubled[0],
            token.value,
            flags=re.DOTALL,
        )

    def type(self) -> Json | str:
        token = self.next()
        word = token.word
        if word in _SIMPLE_TYPES:
            return _SIMPLE_TYPES[word]
        readers = self._readers()
        read_type = readers.get(word or "")
        if read_type is None:
            hint = did_you_mean(token.value, [*_SIMPLE_TYPES, *readers]) if word else ""
            raise self.error(f"expected a type, not {token}.{hint}", token.start)
        return read_type()

    def _readers(self) -> dict[str, Callable[[], Json | str]]:
        """Return the methods that read types with parameters."""
        return {
            "string": self._string_type,
            "char": lambda: self._with_length("char"),
            "character": lambda: self._with_length("char"),
            "varchar": lambda: self._with_length("varchar"),
            "time": self._time,
            "interval": self._interval,
            "array": self._array,
            "map": self._map,
            "struct": self.struct,
            **dict.fromkeys(_DECIMALS, self._decimal),
        }

    def _string_type(self) -> str:
        return f"string collate {self.next().value}" if self._accept("collate") else "string"

    def _number(self) -> int:
        token = self.next()
        if token.word is None or not token.value.isdecimal():
            raise self.error(f"expected a number, not {token}", token.start)
        return int(token.value)

    def _with_length(self, name: str) -> str:
        self._expect("(")
        size = self._number()
        self._expect(")")
        return f"{name}({size})"

    def _time(self) -> str:
        return self._with_length("time") if self.peek().sign == "(" else "time(6)"

    def _decimal(self) -> str:
        start, precision, scale = self.peek().start, 10, 0
        if self._accept("("):
            precision = self._number()
            if self._accept(","):
                scale = self._number()
            self._expect(")")
        if not (1 <= precision <= 38 and scale <= precision):
            raise self.error(
                f"decimal({precision},{scale}) is not possible: a decimal has 1 to 38 digits, and at "
                "most as many after the point",
                start,
            )
        return f"decimal({precision},{scale})"

    def _interval(self) -> str:
        start = self.peek().start
        family = next((units for units in _INTERVAL_UNITS if self.peek().word in units), None)
        if family is None:
            return "interval"
        first = str(self.next().word)
        if not self._accept("to"):
            return f"interval {first}"
        last = self.next().word
        if last not in family or family.index(last) <= family.index(first):
            raise self.error(f"interval {first} to {last} is not a type; write interval day to second", start)
        return f"interval {first} to {last}"

    def _array(self) -> Json:
        self._expect("<")
        element = self.type()
        self._expect(">")
        return {"type": "array", "elementType": element, "containsNull": True}

    def _map(self) -> Json:
        self._expect("<")
        key = self.type()
        self._expect(",")
        value = self.type()
        self._expect(">")
        return {"type": "map", "keyType": key, "valueType": value, "valueContainsNull": True}

    def struct(self) -> Json:
        self._expect("<")
        fields = [] if self.peek().sign == ">" else self.fields()
        self._expect(">")
        return {"type": "struct", "fields": fields}


_DDL_NAMES = {"byte": "tinyint", "short": "smallint", "integer": "int", "long": "bigint", "time(6)": "time"}
_UNQUOTED_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def schema_ddl(schema: pa.Schema) -> list[str]:
    """Return a line of DDL for each column.

    DDL cannot express that elements or values of nested types are not nullable, so this is omitted.
    """
    return [_field(field, " ") for field in json.loads(spark_json(schema))["fields"]]


def type_ddl(field: pa.Field) -> str:
    return _type(json.loads(spark_json(pa.schema([field])))["fields"][0]["type"])


def _field(field: Json, separator: str) -> str:
    name = field["name"]
    quoted_name = name if _UNQUOTED_NAME.fullmatch(name) else "`" + name.replace("`", "``") + "`"
    comment = field["metadata"].get("comment")
    return (
        f"{quoted_name}{separator}{_type(field['type'])}"
        + ("" if field["nullable"] else " not null")
        + (f" comment {_string_literal(comment)}" if isinstance(comment, str) else "")
    )


def _string_literal(value: str) -> str:
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _type(value: Json | str) -> str:
    if isinstance(value, str):
        return _DDL_NAMES.get(value, value)
    if value["type"] == "array":
        return f"array<{_type(value['elementType'])}>"
    if value["type"] == "map":
        return f"map<{_type(value['keyType'])}, {_type(value['valueType'])}>"
    return f"struct<{', '.join(_field(field, ': ') for field in value['fields'])}>"
