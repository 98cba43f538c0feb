"""Files of deletion vectors are deleted once nobody needs them, and not before."""

from __future__ import annotations

import time
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable

from penstock.lake.storage import DeltaLocation
from penstock.tables.delta import unused_vectors, vectors
from penstock.tables.delta.unused_vectors import NOTES_FOLDER, delete_unused_vectors
from tests.tables.delta.row_queries import RowQuery
from tests.tables.delta.vectors import ENABLED, create, live, vectors_of

SCHEMA = pa.schema([("a", pa.int64()), ("v", pa.int64())])
ROWS = 200
DAY = 86_400


class Table:
    """A table with vectors, of which time passes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, **properties: str) -> None:
        monkeypatch.setattr(vectors, "_MIN_FILE_BYTES", 0)
        monkeypatch.setattr(vectors, "_INLINE_BYTES", 0)
        monkeypatch.setattr(unused_vectors.time, "time_ns", lambda: self.now * 1_000_000_000)
        self.folder, self.now, self.batch = folder, int(time.time()), 0
        create(folder, SCHEMA, ENABLED | properties)
        self.query = RowQuery(folder, SCHEMA, "update", ["a"])
        self.query.write(0, pa.table({"a": range(ROWS), "v": [0] * ROWS}, SCHEMA))

    def update(self, key: int) -> str:
        """Change a row of the large file; return the path of its vector."""
        self.batch += 1
        self.query.write(self.batch, pa.table({"a": [key], "v": [self.batch]}, SCHEMA))
        (path,) = (vector.path for vector in vectors_of(self.folder).values())
        assert path is not None
        return path

    def clean(self, days: float = 1.1) -> list[str]:
        """Let time pass; return the files of vectors that are left."""
        self.now += int(days * DAY)
        table = DeltaTable(str(self.folder))
        table.create_checkpoint()
        delete_unused_vectors(DeltaLocation(str(self.folder)), table)
        return sorted(
            f"{vectors.VECTORS_FOLDER}/{path.name}"
            for path in (self.folder / vectors.VECTORS_FOLDER).glob("*")
        )


def test_a_replaced_vector_is_deleted_after_seven_days(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, monkeypatch)
    first, second = table.update(1), table.update(2)
    for _ in range(7):
        assert table.clean() == sorted([first, second])
    assert table.clean() == [second]
    assert len(live(tmp_path)) == ROWS
    for _ in range(20):
        assert table.clean() == [second]
    assert len(list((tmp_path / NOTES_FOLDER).iterdir())) <= 9


@pytest.mark.parametrize(
    "interval", ["interval 2 weeks", "INTERVAL 336 HOURS", "interval 1 week 6 days 24 hours", "14 days"]
)
def test_the_table_may_keep_them_longer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    table = Table(tmp_path, monkeypatch, **{"delta.deletedFileRetentionDuration": interval})
    first, second = table.update(1), table.update(2)
    for _ in range(13):
        assert table.clean() == sorted([first, second])
    assert table.clean() == [second]


@pytest.mark.parametrize("interval", ["interval 2 months", "interval '14' day"])
def test_none_is_deleted_after_a_time_that_is_not_understood(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interval: str
) -> None:
    table = Table(tmp_path, monkeypatch, **{"delta.deletedFileRetentionDuration": interval})
    paths = sorted([table.update(1), table.update(2)])
    for _ in range(3):
        assert table.clean(20) == paths


def test_a_vector_that_comes_back_is_kept_as_long_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, monkeypatch)
    first, second = table.update(1), table.update(2)
    for _ in range(5):
        table.clean()
    DeltaTable(str(tmp_path)).restore(2)
    for _ in range(3):
        assert first in table.clean()
    DeltaTable(str(tmp_path)).restore(3)
    for _ in range(7):
        assert table.clean()[:2] == sorted([first, second])
    assert table.clean() == [second]


def test_a_driver_that_cleans_up_late_keeps_vectors_of_a_version_that_was_restored_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, monkeypatch)
    first = table.update(1)
    table.update(2)
    table.clean()
    DeltaTable(str(tmp_path)).restore(2)
    table.now += 8 * DAY
    delete_unused_vectors(DeltaLocation(str(tmp_path)), DeltaLocation(str(tmp_path)).open(3))
    assert (tmp_path / first).exists()
    assert len(live(tmp_path)) == ROWS


def test_vectors_of_attempts_that_died_are_deleted_and_of_those_that_commit_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = Table(tmp_path, monkeypatch)
    needed = table.update(1)
    dead = vectors.write_vector(DeltaLocation(str(tmp_path)), pa.array([1, 2]).to_numpy()).path
    for _ in range(7):
        assert table.clean() == sorted([needed, str(dead)])
    assert table.clean() == [needed]


def test_commits_clean_up_once_a_day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = Table(tmp_path, monkeypatch, **{"delta.checkpointInterval": "1"})
    for key in range(1, 4):
        table.update(key)
    assert len(list((tmp_path / NOTES_FOLDER).iterdir())) == 1
    table.now += 2 * DAY
    table.update(4)
    assert len(list((tmp_path / NOTES_FOLDER).iterdir())) == 2
    (tmp_path / vectors.VECTORS_FOLDER / "other").write_text("stays")
    (tmp_path / NOTES_FOLDER / "other").write_text("stays")
    table.clean(20)
    assert (tmp_path / vectors.VECTORS_FOLDER / "other").exists()
    assert len(live(tmp_path)) == ROWS
