"""A store written by somebody else: readers fail with a named error, and never loop forever."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock import Store
from penstock.arrow.segments import encode
from penstock.errors import StoreError
from penstock.store.statements import qualify
from tests.support.queues import SCHEMA, rows
from tests.support.raw_sql import raw_connection


def put(store: Store, batch: pa.RecordBatch) -> None:
    """Replace the only payload."""
    database = store.database
    mark = "?" if database.dialect == "sqlite" else "%s"
    text = qualify(f"update penstock.payload set data = {mark}", database.dialect, database.url.schema)
    connection = raw_connection(database)
    connection.execute(text, (encode(batch).to_pybytes(),))
    connection.close()


@pytest.mark.timeout(60)
@pytest.mark.parametrize("found", [0, 2, 4])
def test_a_segment_with_an_unexpected_number_of_rows_is_refused(store: Store, found: int) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(1, 2, 3))
    put(store, pa.RecordBatch.from_pylist(rows(*range(found)), schema=SCHEMA))
    with pytest.raises(StoreError, match=f"has {found} rows") as caught:
        queue.read(0, 0)
    assert caught.value.condition == "SEGMENT_UNREADABLE"


def test_triggers_and_views_of_the_file_can_only_call_sqlites_own_functions(store: Store) -> None:
    if store.database.dialect == "sqlite":
        with store.database.transaction(write=False) as tx:
            assert tx.query("pragma trusted_schema") == [(0,)]
