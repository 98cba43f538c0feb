"""Delta tables whose storage refuses access, or is away: each has its own error, with what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pyarrow as pa
import pytest

from penstock.errors import StoreUnavailableError, TableRefusedError
from penstock.lake.storage import DeltaLocation, is_denied
from penstock.tables.delta.transactions import committing
from tests.support.object_store import KEY, SECRET, ObjectStore, object_store, settings
from tests.tables.delta.row_queries import RowQuery

ROWS = pa.schema([("id", pa.int64()), ("name", pa.string())])
DENIED, AWAY = "STORE_UNAVAILABLE.ACCESS_DENIED", "STORE_UNAVAILABLE.TABLE_STORAGE"


def row(number: int) -> pa.Table:
    return pa.table([[number], ["x"]], schema=ROWS)


@pytest.fixture(scope="module")
def store() -> Iterator[ObjectStore]:
    with object_store() as served:
        served.bucket("lake")
        yield served


@pytest.mark.parametrize("mode", ["append", "update", "complete"])
def test_refused_access_is_reported_and_the_next_run_writes_the_rows_once(
    store: ObjectStore, mode: str
) -> None:
    location = DeltaLocation(f"s3://lake/{mode}", settings(store.endpoint))
    query = RowQuery(location, ROWS, mode, ["id"] if mode == "update" else [])
    query.write(0, row(1))
    store.refuse_everybody()
    for refused in (location.find, partial(query.stage, 1, row(2)), partial(query.write, 1, row(2))):
        with pytest.raises(StoreUnavailableError, match=r"refuses access.*storage options") as caught:
            refused()
        assert caught.value.condition == DENIED
        assert KEY not in str(caught.value)
        assert SECRET not in str(caught.value)
    store.admit_everybody()
    query.write(1, row(2))
    rows = sorted(pa.table(query.table().scan())["id"].to_pylist())
    assert rows == ([2] if mode == "complete" else [1, 2])


@pytest.mark.parametrize(
    ("reason", "condition"),
    [
        ("the operation lacked the necessary privileges: Error performing PUT …/lake/t in 4 ms", DENIED),
        ("Error performing PUT …/lake/t in 30 s - operation timed out", AWAY),
        ("Check constraint: Invalid data found: 'Forbidden'", "TABLE_REFUSED.DELTA"),
    ],
)
def test_errors_that_deltalake_does_not_report_as_those_of_its_storage(reason: str, condition: str) -> None:
    with (
        pytest.raises((StoreUnavailableError, TableRefusedError)) as caught,
        committing(DeltaLocation("s3://lake/t")),
    ):
        raise RuntimeError(reason)
    assert caught.value.condition == condition


def test_a_storage_that_is_away_is_not_taken_for_one_that_refuses() -> None:
    options = {**settings("http://127.0.0.1:9"), "max_retries": "0"}
    for path in ("s3://lake/t", "s3://forbidden/access denied"):
        with pytest.raises(StoreUnavailableError) as caught:
            DeltaLocation(path, options).find()
        assert caught.value.condition == AWAY


@pytest.mark.parametrize(
    "reason",
    [
        "Error performing GET http://127.0.0.1:9/forbidden/t?prefix=access_denied in 3 s - it timed out",
        "Object at location forbidden/t/_delta_log not found: HTTP error: connection closed",
        "[Errno 5] Input/output error: '/data/permission denied/t'",
        "AWS Error NETWORK_CONNECTION during GetObject for key 'forbidden' in bucket 'unauthorized'",
        'connection to server at "forbidden", port 5432 failed: it does not run',
        "Server returned status 503: <Error><Code>SlowDown</Code><BucketName>forbidden</BucketName></Error>",
        'ServerError: {"code": "ServiceUnavailable", "resource": "forbidden"}',
        "HTTPConnectionPool(host='forbidden', port=80): Max retries exceeded with url: /v1/forbidden",
    ],
)
def test_an_outage_of_a_place_with_such_a_name_is_not_refused_access(reason: str) -> None:
    assert not is_denied(OSError(reason))


@pytest.mark.parametrize(
    "reason",
    [
        "Error performing PUT s3:lake/t - <Error><Code>AccessDenied</Code><Key>lake</Key></Error>",
        "[Errno 13] Permission denied: '/data/t'",
        "When reading key 't' in bucket 'lake': AWS Error ACCESS_DENIED during HeadObject operation",
        "An error occurred (ExpiredToken) when calling GetObject: it can't be renewed, isn't it",
        '{"error": "Forbidden", "path": "/lake/t"}',
        "the user doesn't exist: unauthorized. It can't read /lake/t",
        'permission denied for table "iceberg_tables"',
    ],
)
def test_refused_access_is_found_beside_names(reason: str) -> None:
    assert is_denied(OSError(reason))


def test_a_folder_without_rights_names_the_user_rather_than_storage_options(tmp_path: Path) -> None:
    with (
        pytest.raises(StoreUnavailableError, match="user of this process") as caught,
        DeltaLocation(str(tmp_path)).translating_errors(),
    ):
        raise PermissionError(13, "Permission denied", "part-0.parquet")
    assert caught.value.condition == DENIED
