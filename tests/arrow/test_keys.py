"""The key hash against an independent reference in plain Python.

The reference is written from the definition in ``penstock.arrow.key_hash``.
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from decimal import Decimal
from typing import Any

import pyarrow as pa
import pyarrow.types as pat
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.arrow import key_hash as key_hashes
from penstock.arrow.key_hash import check_key, key_hash
from penstock.errors import SchemaMismatchError, UnsupportedTypeError
from tests.support.arrow_strategies import values

MODULUS = 1 << 64
EPOCH = dt.datetime(1970, 1, 1, tzinfo=dt.UTC)


def reference_mix(x: int) -> int:
    x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % MODULUS
    x = (x ^ x >> 27) * 0x94D049BB133111EB % MODULUS
    return x ^ x >> 31


def reference_bytes(value: bytes) -> int:
    total, left = 0, len(value)
    padded = value + bytes(-len(value) % 8)
    for (window,) in struct.iter_unpack("<Q", padded):
        total += reference_mix(window ^ left * 0x9E3779B97F4A7C15 % MODULUS)
        left -= 8
    return total % MODULUS


def reference_word(value: Any, kind: pa.DataType) -> int:
    if value is None:
        return 0x452821E638D01377
    if pat.is_floating(kind):
        bits = struct.pack("<d", 0.0 if value == 0 else value)
        return 0x7FF8000000000000 if math.isnan(value) else int.from_bytes(bits, "little")
    if pat.is_decimal(kind):
        sign, digits, _ = value.as_tuple()
        unscaled = int(f"{'-' * sign}{''.join(map(str, digits))}") % MODULUS**2
        return reference_mix(unscaled % MODULUS) ^ unscaled // MODULUS
    if pat.is_timestamp(kind):
        return int((value.replace(tzinfo=dt.UTC) - EPOCH) // dt.timedelta(microseconds=1)) % MODULUS
    if pat.is_time(kind):
        whole = dt.timedelta(
            hours=value.hour, minutes=value.minute, seconds=value.second, microseconds=value.microsecond
        )
        return int(whole // dt.timedelta(microseconds=1)) * 1000
    if pat.is_duration(kind):
        return int(value // dt.timedelta(microseconds=1)) % MODULUS
    if pat.is_date(kind):
        return int((value - EPOCH.date()).days) % MODULUS
    if pat.is_string(kind):
        return reference_bytes(value.encode())
    return reference_bytes(value) if pat.is_binary(kind) else int(value) % MODULUS


def reference_hash(row: list[Any], kinds: list[pa.DataType]) -> int:
    accumulated = 0x243F6A8885A308D3
    for value, kind in zip(row, kinds, strict=True):
        accumulated = reference_mix(accumulated ^ reference_word(value, kind))
    return accumulated >> 32


KINDS = [
    pa.bool_(),
    pa.int8(),
    pa.int32(),
    pa.int64(),
    pa.float32(),
    pa.float64(),
    pa.string(),
    pa.binary(),
    pa.date32(),
    pa.timestamp("us"),
    pa.timestamp("us", tz="UTC"),
    pa.time64("ns"),
    pa.duration("us"),
    pa.decimal128(38, 5),
    pa.decimal128(3, 3),
]


def hashes(column: pa.Array | pa.ChunkedArray) -> list[int]:
    return list(key_hash(pa.table({"k": column}), ["k"]).to_pylist())


@pytest.fixture(params=["few rows", "vectorised"])
def _way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.param == "vectorised":
        monkeypatch.setattr(key_hashes, "MAX_PYTHON_ROWS", 0)


GOLDEN = [
    (
        pa.array([0, 1, -1, 42, 9223372036854775807, -9223372036854775808, None], pa.int64()),
        [3923772222, 2181330740, 699121028, 1622887763, 2687965400, 154044368, 1734871893],
    ),
    (pa.array([0, 1, -1, 42, None], pa.int8()), [3923772222, 2181330740, 699121028, 1622887763, 1734871893]),
    (pa.array([True, False, None], pa.bool_()), [2181330740, 3923772222, 1734871893]),
    (
        pa.array([0.0, -0.0, 1.5, -1.5, float("inf"), float("nan"), None], pa.float64()),
        [3923772222, 3923772222, 1924786692, 527893447, 78757604, 703924236, 1734871893],
    ),
    (
        pa.array(["", "a", "abcdefgh", "abcdefghi", "grüße", "x" * 100, None], pa.string()),
        [3923772222, 1743417583, 1972245204, 1171005278, 331084898, 2703150839, 1734871893],
    ),
    (
        pa.array([b"", b"\x00", b"\x00\x00\x00\x00\x00\x00\x00\x00", bytes(range(256)), None], pa.binary()),
        [3923772222, 315025281, 1219804131, 2271080447, 1734871893],
    ),
    (
        pa.array([dt.date(1970, 1, 1), dt.date(2024, 2, 29), dt.date(1, 1, 1), None], pa.date32()),
        [3923772222, 4174621530, 21366475, 1734871893],
    ),
    (
        pa.array(
            [
                dt.datetime(2024, 2, 29, 12, 30, 15, 123456, tzinfo=dt.UTC),
                dt.datetime(1900, 1, 1, 0, 0, tzinfo=dt.UTC),
                None,
            ],
            pa.timestamp("us", tz="UTC"),
        ),
        [182284780, 1501543654, 1734871893],
    ),
    (pa.array([dt.time(23, 59, 59, 999999)], pa.time64("ns")), [2895143572]),
    (
        pa.array(
            [dt.timedelta(days=-1, seconds=86399, microseconds=999999), dt.timedelta(days=1)],
            pa.duration("us"),
        ),
        [699121028, 2881744032],
    ),
    (
        pa.array(
            [
                Decimal("0.00"),
                Decimal("1.50"),
                Decimal("-1.50"),
                Decimal("123456789012345678901234567890123456.78"),
                None,
            ],
            pa.decimal128(38, 2),
        ),
        [3923772222, 225127674, 1684629329, 518461022, 1734871893],
    ),
]


@pytest.mark.usefixtures("_way")
@pytest.mark.parametrize(("column", "expected"), GOLDEN, ids=[str(column.type) for column, _ in GOLDEN])
def test_stored_rows_stay_in_their_partition(column: pa.Array, expected: list[int]) -> None:
    # These numbers decide where rows of existing queues lie: a change here is a change of every keyed queue.
    assert hashes(column) == expected


def test_the_order_and_number_of_key_columns_count() -> None:
    table = pa.table({"a": [1], "b": ["x"], "c": pa.array([None], pa.int8())})
    found = [key_hash(table, key)[0].as_py() for key in (["a", "b"], ["b", "a"], ["a"], ["a", "b", "c"])]
    assert found == [2830342836, 1454391003, 2181330740, 3175448799]


@st.composite
def columns(draw: st.DrawFn) -> tuple[list[pa.DataType], list[list[Any]]]:
    kinds = draw(st.lists(st.sampled_from(KINDS), min_size=1, max_size=3))
    one = st.tuples(*(values(kind, nullable=True) for kind in kinds)).map(list)
    return kinds, draw(st.lists(one, min_size=1, max_size=20))


@given(columns(), st.integers(0, 3), st.integers(1, 7), st.integers(0, 200))
def test_the_hash_equals_the_reference_however_the_rows_are_split(
    case: tuple[list[pa.DataType], list[list[Any]]], skip: int, piece: int, repeats: int
) -> None:
    kinds, rows = case
    expected = [reference_hash(row, kinds) for row in rows]
    names = [f"k{i}" for i in range(len(kinds))]
    arrays = [pa.array([row[i] for row in rows], kind) for i, kind in enumerate(kinds)]
    table = pa.table(dict(zip(names, arrays, strict=True)))
    assert key_hash(table, names).to_pylist() == expected
    assert key_hash(table.slice(skip), names).to_pylist() == expected[skip:]
    assert key_hash(table.to_batches()[0].slice(skip), names).to_pylist() == expected[skip:]
    many = pa.concat_tables([table] * (1 + repeats))
    pieces = pa.concat_tables([many.slice(i, piece) for i in range(0, len(many), piece)])
    assert key_hash(pieces, names).to_pylist() == expected * (1 + repeats)
    assert key_hash(pieces, names).null_count == 0


@given(columns())
def test_few_rows_and_many_rows_get_the_same_hashes(case: tuple[list[pa.DataType], list[list[Any]]]) -> None:
    kinds, rows = case
    names = [f"k{i}" for i in range(len(kinds))]
    table = pa.table({n: pa.array([row[i] for row in rows], kinds[i]) for i, n in enumerate(names)})
    few = key_hash(table, names)
    many = pa.concat_tables([table] * (key_hashes.MAX_PYTHON_ROWS + 1))
    assert key_hash(many, names).slice(0, len(rows)).equals(few)


@pytest.mark.usefixtures("_way")
def test_equal_values_of_different_widths_and_layouts_hash_equally() -> None:
    numbers = [0, 1, -1, 127, None]
    assert (
        len(
            {
                tuple(hashes(pa.array(numbers, kind)))
                for kind in (pa.int8(), pa.int16(), pa.int32(), pa.int64())
            }
        )
        == 1
    )
    floats = [0.0, 1.5, None, float("inf")]
    assert len({tuple(hashes(pa.array(floats, kind))) for kind in (pa.float32(), pa.float64())}) == 1
    texts = ["", "a", "a longer text than eight", None]
    layouts = [pa.array(texts, kind) for kind in (pa.string(), pa.large_string(), pa.string_view())]
    layouts += [pa.array(texts).dictionary_encode(), pa.array(texts).cast(pa.binary())]
    assert len({tuple(hashes(layout)) for layout in layouts}) == 1
    moments = [dt.datetime.fromisoformat("2024-01-01"), None]
    units = [pa.array(moments, pa.timestamp(unit)) for unit in ("s", "ms", "us", "ns")]
    assert len({tuple(hashes(unit)) for unit in units}) == 1
    amounts = [Decimal("1.50"), Decimal("-1.50")]
    assert len({tuple(hashes(pa.array(amounts, pa.decimal128(p, 2)))) for p in (3, 18, 19, 38)}) == 1


@pytest.mark.usefixtures("_way")
def test_both_zeros_are_one_key_and_all_nans_are_one_key() -> None:
    other_nans = [0x7FF8000000000001, 0xFFF8000000000000, 0x7FF0000000000001]
    nans = pa.array([0x7FF8000000000000, *other_nans], pa.uint64()).view(pa.float64())
    assert len(set(hashes(nans))) == 1
    assert len(set(hashes(pa.array([0.0, -0.0])))) == 1


@pytest.mark.usefixtures("_way")
def test_strings_with_other_trailing_zeros_or_reordered_blocks_hash_differently() -> None:
    part, other = "abcdefgh", "12345678"
    texts = [
        "",
        "\0",
        "\0\0",
        "a",
        "a\0",
        part,
        part + "\0" * 8,
        part + other,
        other + part,
        part + part,
        None,
    ]
    assert len(set(hashes(pa.array(texts)))) == len(texts)


@pytest.mark.usefixtures("_way")
def test_the_buffer_value_under_a_null_does_not_count() -> None:
    mask = pa.array([True, False])
    assert hashes(pa.array([5, 6]).filter(mask)) != hashes(pa.array([None], pa.int64()))
    garbage = pa.Array.from_buffers(pa.int64(), 2, [pa.py_buffer(b"\x02"), pa.array([5, 6]).buffers()[1]])
    assert hashes(garbage) == hashes(pa.array([None, 6]))
    offsets, data = pa.array([0, 9, 12], pa.int32()).buffers()[1], pa.py_buffer(b"garbage!!key")
    text = pa.Array.from_buffers(pa.string(), 2, [pa.py_buffer(b"\x02"), offsets, data])
    assert hashes(text) == hashes(pa.array([None, "key"]))


@pytest.mark.parametrize("around", [-9, -8, -1, 0, 1, 7, 8, 9])
def test_a_value_longer_than_a_block_is_hashed_by_the_same_rule(
    around: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(key_hashes, "_BLOCK_BYTES", 256)
    sizes = [0, 3, 512 + around, 1, 256, 8, 255 + around, 31]
    texts = [bytes(i * 37 % 256 for i in range(size)) for size in sizes] * (key_hashes.MAX_PYTHON_ROWS // 4)
    assert hashes(pa.array(texts)) == [reference_hash([text], [pa.binary()]) for text in texts]


def test_rows_spread_evenly_over_partitions() -> None:
    for column in (pa.array(range(10_000)), pa.array([f"customer-{i}" for i in range(10_000)])):
        counts = [0] * 7
        for each in hashes(column):
            counts[each % 7] += 1
        assert all(abs(count - 10_000 / 7) < 200 for count in counts)


def test_no_rows_have_no_hashes() -> None:
    empty = pa.table({"k": pa.array([], pa.string())})
    assert key_hash(empty, ["k"]).equals(pa.array([], pa.uint32()))
    assert (
        key_hash(empty.to_batches(max_chunksize=1)[0] if empty.to_batches() else empty, ["k"]).type
        == pa.uint32()
    )


SCHEMA = pa.schema(
    [("customer", pa.string()), ("n", pa.int64()), ("tags", pa.list_(pa.string())), ("v", pa.null())]
)


@pytest.mark.parametrize(
    ("key", "error", "message"),
    [
        (["custommer"], SchemaMismatchError, r"MISMATCH.UNKNOWN_COLUMN\].*Did you mean 'customer'"),
        (["Customer"], SchemaMismatchError, r"MISMATCH.UNKNOWN_COLUMN\].*Did you mean 'customer'"),
        (["n", "n"], SchemaMismatchError, r"MISMATCH.DUPLICATE_COLUMN\].*twice"),
        ([], SchemaMismatchError, r"\[SCHEMA_MISMATCH\].*one or more column names"),
        ("n", SchemaMismatchError, r"\[SCHEMA_MISMATCH\].*one or more column names"),
        (["n", "tags"], UnsupportedTypeError, "list<item: string>"),
        (["v"], UnsupportedTypeError, "null"),
    ],
)
def test_an_invalid_key_is_refused(key: list[str], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        check_key(SCHEMA, key)


def test_a_valid_key_is_accepted() -> None:
    check_key(SCHEMA, ["n", "customer"])
    check_key(
        pa.schema([(str(i), kind) for i, kind in enumerate(KINDS)]), [str(i) for i in range(len(KINDS))]
    )
