"""Tables that are created in an object store whose reply is lost, or at the same time by another program."""

from __future__ import annotations

import json
import subprocess
import sys

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Schema

from tests.support.object_proxy import Exchange, no_reply, object_proxy
from tests.support.object_store import ObjectStore, object_store, settings

# In a process of its own, since deltalake waits for the proxy while it holds Python's lock.
PROGRAM = """
import json, sys
import pyarrow as pa
from penstock.lake.storage import DeltaLocation

location = DeltaLocation("s3://lake/t", json.loads(sys.argv[1]))
table = location.create(pa.schema([("ours", pa.int64())]))
print(json.dumps([field.name for field in table.schema().fields]))
"""


def operations(store: ObjectStore) -> list[str]:
    table = DeltaTable("s3://lake/t", storage_options=settings(store.endpoint))
    return [commit["operation"] for commit in table.history()]


def created(endpoint: str) -> list[str]:
    """The columns of the table that a program creates."""
    command = [sys.executable, "-c", PROGRAM, json.dumps(settings(endpoint))]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    columns = json.loads(done.stdout)
    return list(columns)


@pytest.mark.parametrize("overtaken", [False, True])
def test_a_table_is_created_once(overtaken: bool) -> None:
    with object_store() as store, object_proxy(store.endpoint) as proxy:
        store.bucket("lake")

        def overtake(exchange: Exchange) -> None:
            theirs = Schema.from_arrow(pa.schema([("theirs", pa.int64())]))
            DeltaTable.create("s3://lake/t", theirs, storage_options=settings(store.endpoint))
            exchange.answer(*exchange.forward())

        proxy.fail("PUT", overtake if overtaken else no_reply)
        assert created(proxy.endpoint) == ["theirs" if overtaken else "ours"]
        assert not proxy.pending
        assert operations(store) == ["CREATE TABLE"]
