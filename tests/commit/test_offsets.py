"""The ranges of a micro-batch, as read from Spark's offset log."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.commit.offsets import QueueOffset, batch_ranges, other_offsets, pad
from penstock.errors import CheckpointMismatchError

A = QueueOffset("store-1", "orders", "billing", 7, 3, (0, 0), (10, 5))


def test_an_offset_is_read_back_from_its_json() -> None:
    assert QueueOffset.of(A.to_dict()) == A


def test_an_offset_from_before_the_queue_grew_starts_at_zero_in_new_partitions() -> None:
    value = {**A.to_dict(), "from": [4], "to": [10, 5, 2]}
    found = QueueOffset.of(value)
    assert found is not None
    assert (found.start, found.end) == ((4, 0, 0), (10, 5, 2))
    assert pad((1, 2), 4) == (1, 2, 0, 0)
    assert pad((1, 2), 1) == (1, 2)


@pytest.mark.parametrize(
    "line", [None, 1, "text", [1, 2], {}, {"topic": {"0": 5}}, {"logOffset": 3}, {"from": [0], "to": [1]}]
)
def test_offsets_of_other_sources_are_not_parsed(line: object) -> None:
    assert QueueOffset.of(line) is None
    assert other_offsets([A.to_dict(), line]) == [line]


def test_the_first_micro_batch_covers_the_range_of_its_own_offset() -> None:
    assert batch_ranges([None, A.to_dict(), {"logOffset": 0}], []) == [A]


def test_a_source_without_a_new_offset_keeps_its_position() -> None:
    after = replace(A, start=(10, 5), end=(12, 5))
    other = replace(A, consumer="audit")
    ranges = batch_ranges([after.to_dict(), other.to_dict()], [A.to_dict(), other.to_dict()])
    assert ranges == [after, replace(other, start=(10, 5))]
    assert [r.empty for r in ranges] == [False, True]


def test_a_micro_batch_without_new_offsets_covers_nothing() -> None:
    assert [r.empty for r in batch_ranges([A.to_dict()], [A.to_dict()])] == [True]


def test_an_offset_that_was_never_moved_is_an_empty_range() -> None:
    assert batch_ranges([replace(A, end=(0, 0)).to_dict()], [])[0].empty


def test_equal_offsets_of_one_consumer_are_one_source() -> None:
    """Spark writes one offset for each use of a DataFrame, for example in a self-union."""
    assert batch_ranges([A.to_dict(), A.to_dict()], []) == [A]


def test_one_consumer_with_two_ranges_is_refused() -> None:
    other = replace(A, end=(11, 5))
    with pytest.raises(CheckpointMismatchError, match=r"'billing' reads queue 'orders' twice"):
        batch_ranges([A.to_dict(), other.to_dict()], [])


def test_two_reads_without_a_consumer_may_differ() -> None:
    first, second = replace(A, consumer=None), replace(A, consumer=None, end=(11, 5))
    assert batch_ranges([first.to_dict(), second.to_dict()], [])[0] == first


@pytest.mark.parametrize(
    ("field", "value"), [("store", "store-2"), ("queue", "other"), ("consumer", None), ("generation", 8)]
)
def test_an_offset_of_another_source_is_refused_naming_the_difference(field: str, value: object) -> None:
    expected = {"store": "store-1", "queue": "orders", "consumer": "billing", "generation": 7}
    A.require(**expected)  # type: ignore[arg-type]  # a dict of the parameters
    with pytest.raises(CheckpointMismatchError, match=f"offset has {field} ") as caught:
        A.require(**{**expected, field: value})
    assert caught.value.parameters["field"] == field
