"""If a store was removed while it was open, the store that takes its place gets none of the old store's
rows.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import penstock
from penstock.errors import StoreNotFoundError
from penstock.objects.local import LocalStorage
from tests.support.object_queues import SCHEMA, large, objects, small
from tests.support.queues import everything
from tests.support.raw_sql import run_sql


@pytest.fixture
def replaced(store: penstock.Store, store_url: str, folder: Path) -> Iterator[tuple[Any, penstock.Store]]:
    """An open store that no longer exists, and the store that has taken its place."""
    if store_url.startswith("sqlite"):
        pytest.skip("a file that is replaced is noticed at once: tests/store")
    store.create_queue("q", SCHEMA, partitions=2, payloads=folder)
    store.clean_up_objects()
    run_sql(store.database, f"drop schema {store.database.url.schema} cascade")
    with penstock.connect(store_url) as new:
        new.create_queue("q", SCHEMA, partitions=2, payloads=folder)
        yield store, new


def test_rows_are_not_written_to_a_store_that_has_replaced_another(
    replaced: tuple[penstock.Store, penstock.Store], folder: Path
) -> None:
    old, new = replaced
    queue = new.queue("q")
    for number in range(4):
        queue.append(small(number), 0)
    before = set(objects(folder))
    for call in (
        lambda: old.queue("q").append(large(9), 0),
        old.queue("q").compact,
        old.clean_up_objects,
        lambda: old.clean_up_objects(take_over=True),
    ):
        with pytest.raises(StoreNotFoundError, match="another store has taken its place") as caught:
            call()
        assert caught.value.condition == "STORE_NOT_FOUND.REPLACED"
    assert set(objects(folder)) == before
    queue.append(large(5), 1)
    with pytest.raises(StoreNotFoundError, match="another store has taken its place"):
        old.queue("q").read(1, 0)
    for call in (
        lambda: old.create_queue("other", SCHEMA, payloads=folder),
        lambda: old.create_queue("other", SCHEMA),
        lambda: old.set_payloads("database"),
    ):
        with pytest.raises(StoreNotFoundError, match="another store has taken its place"):
            call()
    assert new.clean_up_objects() == 0
    assert everything(queue) == {0: [0, 1, 2, 3], 1: [5]}


def test_an_object_is_not_recorded_in_a_store_that_has_replaced_its_own(
    store: penstock.Store, queue: penstock.Queue, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = LocalStorage.put

    def late(*arguments: Any, **named: Any) -> object:
        run_sql(store.database, f"update penstock.store set uuid = '{uuid.uuid4()}'")
        return put(*arguments, **named)

    monkeypatch.setattr(LocalStorage, "put", late)
    with pytest.raises(StoreNotFoundError, match="another store has taken its place"):
        queue.append(large(1), 0)
    assert queue.info().rows == 0
