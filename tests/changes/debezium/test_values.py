"""Values of Debezium's JSON, a column at a time: exactly the valid ones are read, wherever the others
are.
"""

from __future__ import annotations

import math
from decimal import Decimal
from functools import partial

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.changes.debezium.binary_text import binary_reader, decimals_from_base64, encoded
from penstock.changes.debezium.declared import Declared
from penstock.changes.debezium.decoding import Encoding, decode_column, decoder
from tests.changes.debezium.decimals import to_base64

JUNK = st.sampled_from(["=", "A", "AA", "AAA", "AA=A", "A===", "AAAA=", "====", "??==", "ä", "AAA\n"])


def texts(values: list[str | None], skip: int) -> pa.Array:
    """A column that begins somewhere inside a longer one."""
    return pa.array([*["AA=="] * skip, *values], pa.string()).slice(skip)


@pytest.mark.parametrize("encoding", ["base64", "hex"])
@given(data=st.data())
def test_bytes_are_parsed_from_their_text(encoding: str, data: st.DataObject) -> None:
    value = st.one_of(st.binary(max_size=9), st.none(), JUNK)
    values = data.draw(st.lists(value, max_size=20))
    given_texts = [encoded(each, encoding) if isinstance(each, bytes) else each for each in values]
    junk = {each for each in values if isinstance(each, str)}
    column = texts(given_texts, data.draw(st.integers(0, 2)))
    read = decode_column(column, binary_reader(encoding), pa.binary())
    expected = [each if isinstance(each, bytes) else None for each in values]
    if encoding == "hex" and "AA" in junk:
        expected = [b"\xaa" if each == "AA" else was for each, was in zip(values, expected, strict=True)]
    assert read.to_pylist() == expected
    read.validate(full=True)


@given(data=st.data())
def test_precise_decimals_are_exact_or_not_read(data: st.DataObject) -> None:
    precision = data.draw(st.sampled_from([1, 9, 18, 19, 37, 38]))
    scale = data.draw(st.integers(0, precision))
    most = 10**precision - 1
    edges = [0, 1, -1, 127, 128, -128, -129, most, -most, most + 1, -most - 1, 2**127, -(2**127), 2**200]
    number = st.one_of(st.sampled_from(edges), st.integers(-most, most), st.none())
    numbers = data.draw(st.lists(number, max_size=20))
    kind = pa.decimal128(precision, scale)
    column = texts(
        [None if each is None else to_base64(each) for each in numbers], data.draw(st.integers(0, 2))
    )
    read = decode_column(column, partial(decimals_from_base64, kind=kind, scale=kind.scale), kind)
    fits = [each if each is not None and abs(each) <= most else None for each in numbers]
    assert read.to_pylist() == [
        None if each is None else Decimal((each < 0, [int(digit) for digit in str(abs(each))], -scale))
        for each in fits
    ]


def test_an_empty_text_is_valid_for_bytes_and_invalid_for_decimals() -> None:
    column = pa.array(["", None], pa.string())
    assert decode_column(column, binary_reader("base64"), pa.binary()).to_pylist() == [b"", None]
    kind = pa.decimal128(5, 2)
    assert decode_column(
        column, partial(decimals_from_base64, kind=kind, scale=kind.scale), kind
    ).to_pylist() == [None, None]


def read_floats(values: list[str], kind: pa.DataType, declared: str | None = None) -> list[float | None]:
    decode = decoder(kind, None if declared is None else Declared(declared), Encoding())
    assert decode is not None
    found: list[float | None] = decode_column(pa.array(values, pa.string()), decode, kind).to_pylist()
    return found


@given(doubles=st.lists(st.floats()), floats=st.lists(st.floats(width=32)))
def test_the_shortest_text_of_a_float_is_read_as_it(doubles: list[float], floats: list[float]) -> None:
    def texts(values: list[object]) -> list[str]:
        return [str(value).replace("nan", "NaN").replace("inf", "Infinity") for value in values]

    for declared in (None, "double"):
        assert repr(read_floats(texts([*doubles]), pa.float64(), declared)) == repr(doubles)
    for declared in (None, "float", "double"):
        assert repr(read_floats(texts([*map(np.float32, floats)]), pa.float32(), declared)) == repr(floats)


@given(
    digits=st.integers(-(10**24), 10**24),
    exponent=st.integers(-400, 400),
    single=st.booleans(),
    e=st.booleans(),
)
def test_a_decimal_that_is_read_as_a_float_is_the_one_that_the_float_stands_for(
    digits: int, exponent: int, single: bool, e: bool
) -> None:
    number = Decimal(digits).scaleb(exponent)
    text = f"{digits}e{exponent}" if e else f"{number:f}"
    (found,) = read_floats([text], pa.float32() if single else pa.float64(), "string")
    if found is None:
        return
    if not single:
        assert Decimal(repr(found)) == number or Decimal(found) == number
    elif digits:
        # To the last digit of the number, or as the double that the float is.
        last = Decimal(1).scaleb(number.normalize().as_tuple().exponent)
        is_close = abs(Decimal(found) - number) <= last / 2 * Decimal("1.000001")
        assert is_close or (float(text) == found and len(number.normalize().as_tuple().digits) <= 17)
        assert math.isfinite(found)
