"""Objects with the payloads of several segments."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import StoreError
from penstock.objects.bundle import PackedPayload, pack, read_index

PAYLOADS = st.lists(
    st.builds(
        PackedPayload,
        st.integers(0, 10_000),
        st.integers(1, 1 << 40),
        st.integers(1, 1000),
        st.binary(max_size=200),
    ),
    min_size=1,
    max_size=20,
)


@given(PAYLOADS)
def test_each_payload_is_where_its_place_says(payloads: list[PackedPayload]) -> None:
    parts, places = pack(payloads)
    data = b"".join(parts)
    for each, place in zip(payloads, places, strict=True):
        found = data[place.offset : place.offset + place.length]
        assert found == each.payload
        assert place.matches(found)


@given(PAYLOADS)
def test_the_index_says_what_an_object_holds(payloads: list[PackedPayload]) -> None:
    parts, places = pack(payloads)
    index = read_index(b"".join(parts))
    assert index.to_pylist() == [
        {
            "partition": each.partition,
            "rows": each.rows,
            "columns_id": each.columns_id,
            "offset": place.offset,
            "length": place.length,
            "checksum": place.checksum,
        }
        for each, place in zip(payloads, places, strict=True)
    ]


@given(PAYLOADS, st.data())
def test_damage_is_seen(payloads: list[PackedPayload], data: st.DataObject) -> None:
    parts, places = pack(payloads)
    whole = b"".join(parts)
    at = data.draw(st.integers(0, len(whole) - 1))
    damaged = whole[:at] + bytes([whole[at] ^ data.draw(st.integers(1, 255))]) + whole[at + 1 :]
    held = [place.matches(damaged[place.offset : place.offset + place.length]) for place in places]
    if all(held):
        with pytest.raises(StoreError) as unreadable:
            read_index(damaged)
        assert unreadable.value.condition == "STORE_ERROR.OBJECT_DAMAGED"


@given(PAYLOADS, st.integers(1, 300))
def test_an_object_that_was_cut_off_has_no_index(payloads: list[PackedPayload], lost: int) -> None:
    whole = b"".join(pack(payloads)[0])
    with pytest.raises(StoreError):
        read_index(whole[: max(len(whole) - lost, 0)])
