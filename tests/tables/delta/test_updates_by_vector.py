"""Output mode update with deletion vectors: which files get one, and what the log and readers say of it."""

from __future__ import annotations

import json
import shutil
import uuid
import zlib
from datetime import date
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from penstock.errors import CommitRefusedError
from penstock.lake.deletion_vectors import DeletionVector, encode
from penstock.lake.storage import DeltaLocation
from penstock.tables.delta import log_commit, vectors
from penstock.tables.delta.log_files import adds_in_log
from tests.support.object_store import KEY, SECRET, object_store
from tests.support.object_store import settings as object_settings
from tests.tables.delta.overtaken import MANY, SCHEMA, Hook, filled, table_of
from tests.tables.delta.row_queries import RowQuery
from tests.tables.delta.vectors import ENABLED, added, commit, create, give_vector, live, log_of, vectors_of


@pytest.fixture(autouse=True)
def every_file_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)


@pytest.mark.parametrize("inline", [0, 1 << 10])
def test_a_few_rows_of_a_file_get_a_vector(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inline: int
) -> None:
    monkeypatch.setattr(vectors, "_INLINE_BYTES", inline)
    query = filled(tmp_path, ENABLED)
    (before,) = query.own_files()
    query.write(1, table_of({(3, "new"): 1, (999, "new"): 1}))
    assert before in query.own_files()
    assert vectors_of(tmp_path)[before].cardinality == 1
    query.write(2, table_of({(3, "again"): 2, (5, "again"): 2}))
    assert vectors_of(tmp_path)[before].cardinality == 2
    assert {vector.path is None for vector in vectors_of(tmp_path).values()} == {bool(inline)}
    kept = [(n, "x", 0) for n in range(MANY) if n not in (3, 5)]
    assert live(tmp_path) == sorted([*kept, (3, "again", 2), (5, "again", 2), (999, "new", 1)], key=repr)
    removes = [action["remove"] for action in log_of(tmp_path, 3) if "remove" in action]
    (removed,) = [remove for remove in removes if remove["path"] == before]
    assert removed["deletionVector"]["cardinality"] == 1
    stats = json.loads(next(add["stats"] for add in added(tmp_path, 3) if add["path"] == before))
    assert stats["numRecords"] == MANY
    assert stats["tightBounds"] is False
    assert stats["maxValues"]["a"] == MANY - 1


def test_a_file_that_has_lost_a_share_of_its_rows_is_copied(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED)
    (before,) = query.own_files()
    for number in range(10):
        query.write(number + 1, table_of({(number, "new"): 1}))
        assert before in query.own_files(), number
    query.write(11, table_of({(10, "new"): 1}))
    assert before not in query.own_files()
    assert vectors_of(tmp_path) == {}
    assert len(live(tmp_path)) == MANY


def test_a_file_without_live_rows_is_removed(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED)
    (add,) = added(tmp_path, 1)
    give_vector(tmp_path, add, inline_vector(range(1, MANY)))
    query.write(1, table_of({(0, "new"): 1}))
    assert live(tmp_path) == [(0, "new", 1)]
    assert len(query.table().file_uris()) == 1


def inline_vector(positions: Any) -> DeletionVector:
    array = np.array(list(positions))
    return DeletionVector.inline(encode(array), len(array))


@pytest.mark.parametrize("properties", [{}, {"delta.enableDeletionVectors": "false"}])
def test_only_tables_with_the_property_get_vectors(tmp_path: Path, properties: dict[str, str]) -> None:
    create(tmp_path, SCHEMA, properties)
    query = RowQuery(tmp_path, SCHEMA, "update", ["a"])
    query.write(0, table_of({(n, "x"): 0 for n in range(MANY)}))
    query.write(1, table_of({(3, "new"): 1}))
    assert vectors_of(tmp_path) == {}
    assert query.rows() == sorted([*((n, "x", 0) for n in range(MANY) if n != 3), (3, "new", 1)], key=repr)


def test_vectors_of_a_table_that_wants_no_more_are_heeded(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED)
    query.write(1, table_of({(3, "new"): 1}))
    query.table().alter.set_table_properties({"delta.enableDeletionVectors": "false"})
    query.write(2, table_of({(4, "new"): 1}))
    assert vectors_of(tmp_path) == {}
    kept = [(n, "x", 0) for n in range(MANY) if n not in (3, 4)]
    assert live(tmp_path) == sorted([*kept, (3, "new", 1), (4, "new", 1)], key=repr)


def test_small_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 1 << 20)
    query = filled(tmp_path, ENABLED)
    query.write(1, table_of({(3, "new"): 1}))
    assert vectors_of(tmp_path) == {}
    assert len(live(tmp_path)) == MANY


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Hook:
    return Hook(monkeypatch)


@pytest.mark.parametrize("moment", ["PLANNED", "CHECKED"])
def test_a_driver_that_wakes_after_the_log_was_cleaned_up_loses_nothing(
    tmp_path: Path, hook: Hook, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """The log has no file for the next version then, since it has later ones, and a checkpoint."""
    query, other = filled(tmp_path, ENABLED), RowQuery(tmp_path, SCHEMA, "update", ["a"], "other")
    create_file = log_commit.create_if_absent

    def sleep() -> None:
        monkeypatch.setattr(log_commit, "create_if_absent", create_file)
        for number in range(3):
            other.write(number, table_of({(number, "other"): number}))
        table = query.table()
        table.create_checkpoint()
        for version in range(table.version()):
            (tmp_path / "_delta_log" / f"{version:020}.json").unlink()

    def sleeping(*arguments: Any) -> bool:
        sleep()
        return create_file(*arguments)

    if moment == "PLANNED":
        hook.calls.append(sleep)
    else:
        monkeypatch.setattr(log_commit, "create_if_absent", sleeping)
    query.write(1, table_of({(1, "new"): 7, (50, "new"): 7}))
    kept = [(n, "x", 0) for n in range(3, MANY) if n != 50]
    new = [(0, "other", 0), (1, "new", 7), (2, "other", 2), (50, "new", 7)]
    assert live(tmp_path) == sorted([*kept, *new], key=repr)


def test_a_lost_answer_of_the_storage_commits_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    query, create_file, calls = filled(tmp_path, ENABLED), log_commit.create_if_absent, []

    def losing(*arguments: Any) -> bool:
        calls.append(create_file(*arguments))
        if len(calls) == 1:
            raise OSError("connection reset")
        return calls[-1]

    monkeypatch.setattr(log_commit, "create_if_absent", losing)
    rows = table_of({(3, "new"): 1})
    query.write(1, rows)
    query.write(1, rows)
    assert calls == [True]
    assert len(live(tmp_path)) == MANY


def test_checkpoints_are_written_and_keep_vectors_and_transactions(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED | {"delta.checkpointInterval": "3"})
    for number in range(1, 4):
        query.write(number, table_of({(3, "new"): number}))
    last = json.loads((tmp_path / "_delta_log/_last_checkpoint").read_text())
    assert last["version"] == 2
    for version in range(3):
        (tmp_path / "_delta_log" / f"{version:020}.json").unlink()
    query.write(3, table_of({(3, "other"): 0}))
    query.write(4, table_of({(4, "new"): 4}))
    assert sorted(vector.cardinality for vector in vectors_of(tmp_path).values()) == [2]
    kept = [(n, "x", 0) for n in range(MANY) if n not in (3, 4)]
    assert live(tmp_path) == sorted([*kept, (3, "new", 3), (4, "new", 4)], key=repr)


def test_the_log_of_an_earlier_version_is_read_beside_later_checkpoints(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED | {"delta.checkpointInterval": "3"})
    for number in range(1, 8):
        query.write(number, table_of({(3, "new"): number}))
    for version in range(1, 8):
        table = query.location.open(version)
        paths = pa.table(table.get_add_actions())["path"].to_pylist()
        adds = adds_in_log(query.location, version, paths)
        vectors_then = sum("deletionVector" in add for add in adds.values())
        assert vectors_then == pa.table(table.deletion_vectors()).num_rows


def test_what_a_checkpoint_says_in_other_columns_is_in_no_commit(tmp_path: Path) -> None:
    """Statistics in columns have dates and decimals, of which JSON has none."""
    schema = pa.schema([("a", pa.int64()), ("d", pa.date32()), ("n", pa.decimal128(9, 2))])
    create(tmp_path, schema, ENABLED | {"delta.checkpoint.writeStatsAsStruct": "true"})
    query = RowQuery(tmp_path, schema, "update", ["a"])
    days, numbers = [date(2020, 1, 1)] * MANY, [Decimal("1.50")] * MANY
    query.write(0, pa.table({"a": range(MANY), "d": days, "n": numbers}, schema))
    query.table().create_checkpoint()
    (before,) = added(tmp_path, 1)
    query.write(1, pa.table({"a": [3], "d": [None], "n": [None]}, schema))
    (again,) = [add for add in added(tmp_path, 2) if add["path"] == before["path"]]
    assert again.keys() == {name for name in before if before[name] is not None} | {"deletionVector"}
    assert len(live(tmp_path)) == MANY


def test_no_commit_is_written_into_a_table_that_was_dropped_and_created_again(
    tmp_path: Path, hook: Hook
) -> None:
    query = filled(tmp_path, ENABLED)
    query.write(1, table_of({(3, "new"): 1}))
    # One that has committed something is refused earlier.
    another = RowQuery(tmp_path, SCHEMA, "update", ["a"], app_id="another")

    def recreate() -> None:
        shutil.rmtree(tmp_path)
        create(tmp_path, SCHEMA)

    hook.calls.append(recreate)
    with pytest.raises(CommitRefusedError, match="STAGED_FILES_MISSING"):
        another.write(0, table_of({(4, "new"): 1}))
    assert live(tmp_path) == []
    another.write(0, table_of({(4, "new"): 1}))
    assert live(tmp_path) == [(4, "new", 1)]


def test_vectors_of_other_places_are_left_to_deltalake(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED)
    (add,) = added(tmp_path, 1)
    data = encode(np.array([1, 2]))
    vector = DeletionVector.in_file("", uuid.uuid4(), data, 2)
    (tmp_path / "elsewhere.bin").write_bytes(b"\1" + len(data).to_bytes(4, "big") + data + crc(data))
    location = DeletionVector("p", (tmp_path / "elsewhere.bin").as_uri(), len(data), 2, vector.offset)
    give_vector(tmp_path, add, location)
    query.write(1, table_of({(3, "new"): 1}))
    kept = [(n, "x", 0) for n in range(MANY) if n not in (1, 2, 3)]
    assert live(tmp_path) == sorted([*kept, (3, "new", 1)], key=repr)


def crc(data: bytes) -> bytes:
    return zlib.crc32(data).to_bytes(4, "big")


@pytest.mark.parametrize("stats", [None, '{"numRecords":99}', '{"numRecords":100,"tightBounds":true}'])
def test_statistics_of_other_writers_decide(tmp_path: Path, stats: str | None) -> None:
    query = filled(tmp_path, ENABLED)
    (add,) = added(tmp_path, 1)
    old = {"path": add["path"], "size": add["size"], "partitionValues": {}, "dataChange": True}
    new = {**add, "stats": stats} if stats else {name: add[name] for name in add if name != "stats"}
    commit(tmp_path, {"remove": {**old, "deletionTimestamp": 1}})
    commit(tmp_path, {"add": new})
    query.write(1, table_of({(3, "new"): 1}))
    assert len(vectors_of(tmp_path)) == (1 if stats and "tight" in stats else 0)
    kept = [(n, "x", 0) for n in range(MANY) if n != 3]
    assert live(tmp_path) == sorted([*kept, (3, "new", 1)], key=repr)
    for found in (json.loads(add["stats"]) for add in added(tmp_path, 4) if "deletionVector" in add):
        assert found == {"numRecords": MANY, "tightBounds": False}


def test_complete_mode_replaces_files_with_vectors(tmp_path: Path) -> None:
    query = filled(tmp_path, ENABLED)
    query.write(1, table_of({(3, "new"): 1}))
    complete = RowQuery(tmp_path, SCHEMA, "complete", app_id="complete")
    complete.write(0, table_of({(7, "only"): 1}))
    assert live(tmp_path) == [(7, "only", 1)]
    assert len(query.own_files()) == 1


def test_large_vectors_are_written_whole(tmp_path: Path) -> None:
    positions = np.unique(np.random.default_rng(7).integers(0, 1 << 25, 1 << 21))
    location = DeltaLocation(str(tmp_path))
    vector = vectors.write_vector(location, positions)
    assert vector.size > 1 << 21
    assert np.array_equal(vector.positions(location.files()), positions)


def test_a_driver_that_wakes_late_commits_no_vector_without_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hook: Hook
) -> None:
    monkeypatch.setattr(vectors, "_INLINE_BYTES", 0)
    query = filled(tmp_path, ENABLED)
    stage, files = query.stage(1, table_of({(3, "new"): 1}))

    def clean() -> None:
        for path in (tmp_path / vectors.VECTORS_FOLDER).iterdir():
            path.unlink()

    hook.calls.append(clean)
    monkeypatch.setattr("penstock.tables.delta.stage.time.time", lambda: stage.started_at + 8 * 86_400)
    with pytest.raises(CommitRefusedError, match="STAGED_FILES_MISSING"):
        query.commit(stage, files)
    assert len(live(tmp_path)) == MANY


def test_tables_in_an_object_store_get_vectors() -> None:
    with object_store() as store:
        store.bucket("lake")
        location = DeltaLocation("s3://lake/t", object_settings(store.endpoint))
        table = location.create(SCHEMA)
        table.alter.set_table_properties(ENABLED)
        query = RowQuery(location, SCHEMA, "update", ["a"])
        query.write(0, table_of({(n, "x"): 0 for n in range(MANY)}))
        query.write(1, table_of({(3, "new"): 1}))
        query.write(2, table_of({(3, "new"): 2, (4, "new"): 2}))
        rows = pa.table(query.table().scan()).to_pylist()
        assert len(rows) == MANY
        assert pa.table(query.table().deletion_vectors()).num_rows == 1


def test_credentials_that_only_deltalake_finds_get_no_vectors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A profile of the AWS command line is one of several places where it looks for them."""
    lines = f"[lake]\naws_access_key_id={KEY}\naws_secret_access_key={SECRET}\n"
    (tmp_path / "credentials").write_text(lines)
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_PROFILE", "lake")
    monkeypatch.setenv("AWS_FORCE_CREDENTIAL_LOAD", "true")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    with object_store() as store:
        store.bucket("lake")
        options = object_settings(store.endpoint)
        del options["AWS_ACCESS_KEY_ID"], options["AWS_SECRET_ACCESS_KEY"]
        location = DeltaLocation("s3://lake/t", options)
        location.create(SCHEMA, ENABLED)
        query = RowQuery(location, SCHEMA, "update", ["a"])
        query.write(0, table_of({(n, "x"): 0 for n in range(MANY)}))
        query.write(1, table_of({(3, "new"): 1}))
        assert pa.table(query.table().deletion_vectors()).num_rows == 0
        assert len(pa.table(query.table().scan())) == MANY
