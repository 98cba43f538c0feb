"""The library leaves logging to the program; without any configuration, warnings are shown."""

from __future__ import annotations

import logging
import subprocess
import sys
from urllib.parse import urlsplit

import pyarrow as pa
import pytest

import penstock

_WARN = "import penstock, logging; logging.getLogger('penstock.store').warning('look at this')"
_CONFIGURED = f"import logging; logging.basicConfig(format='seen %(message)s'); {_WARN}"


@pytest.mark.parametrize(
    ("program", "shown"), [(_WARN, "look at this\n"), (_CONFIGURED, "seen look at this\n")]
)
def test_the_program_decides_how_warnings_are_shown(program: str, shown: str) -> None:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stderr == shown


def test_store_operations_are_logged_with_queue_and_consumer(
    store_url: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.DEBUG, "penstock"), penstock.connect(store_url) as store:
        orders = store.create_queue(
            "orders", pa.schema([("id", pa.int64())]), retention=penstock.Retention(rows=1)
        )
        orders.append([{"id": 1}, {"id": 2}])
        orders.add_partitions(1)
        orders.trim()
        billing = store.create_consumer("billing")
        billing.register("orders")
        billing.seek("orders", to="latest", dry_run=True)
        billing.seek("orders", to="latest")
        billing.unregister("orders")
        producer = store.producer("orders", "web")
        # Into the partition that is empty: in the other one it would be one row too many, and maintenance
        # might trim that too.
        producer.append([{"id": 3}], sequence=7, partition=1)
        producer.append([{"id": 3}], sequence=7, partition=1)
        store.drop_queue("orders")
        store.drop_consumer("billing")
    logged = [vars(record) for record in caplog.records]
    assert [
        each["action"] for each in logged if each["action"] not in ("trimmed", "maintenance_skipped")
    ] == [
        "store_created",
        "queue_created",
        "appended",
        "queue_grown",
        "consumer_created",
        "consumer_registered",
        "consumer_sought",
        "consumer_unregistered",
        "session_opened",
        "appended",
        "append_skipped",
        "queue_dropped",
        "consumer_dropped",
    ]
    assert {each["queue"] for each in logged if "queue" in each} == {"orders"}
    (trimmed,) = [each for each in logged if each["action"] == "trimmed"]
    assert (trimmed["start"], trimmed["end"]) == (0, 1)
    assert next(each for each in logged if each["action"] == "append_skipped")["sequence"] == 7


def test_no_record_contains_a_password(pg_url: str, caplog: pytest.LogCaptureFixture) -> None:
    password = str(urlsplit(pg_url).password)
    assert len(password) > 3
    with caplog.at_level(logging.DEBUG, "penstock"):
        with penstock.connect(
            f"{pg_url}{'&' if '?' in pg_url else '?'}schema=logs_without_passwords"
        ) as store:
            store.create_consumer("billing")
            store.drop_consumer("billing")
        gone = pg_url.replace(f":{urlsplit(pg_url).port}", ":1")
        with pytest.raises(penstock.errors.StoreUnavailableError):
            penstock.connect(gone, timeout=0.1)
    assert {record.levelname for record in caplog.records} == {"INFO", "WARNING"}
    assert not [record for record in caplog.records if password in repr(vars(record)) + record.getMessage()]
