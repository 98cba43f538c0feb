"""An append rings the bell of its queue, for those who watch it and for nobody else."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import penstock
from penstock.errors import AlreadyExists
from penstock.store.sqlite import wakeups
from penstock.store.sqlite.wakeups import FileEvents
from tests.store.programs import SCHEMA
from tests.support.waiting import readable

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="inotify is Linux's")


@pytest.fixture
def store(tmp_path: Path) -> Iterator[penstock.Store]:
    with penstock.connect(f"sqlite:///{tmp_path}/x.db") as store:
        yield store


def _hung(tmp_path: Path, queue: penstock.Queue) -> FileEvents:
    bell = wakeups.listen(str(tmp_path / "x.db"), queue.record.queue_id)
    assert bell is not None
    return bell


def _rung(bell: FileEvents) -> bool:
    return readable(bell, 0) and bell.heard()


def test_an_append_rings_and_neither_a_read_nor_a_rollback_does(
    tmp_path: Path, store: penstock.Store
) -> None:
    queue, other = store.create_queue("q", SCHEMA), store.create_queue("other", SCHEMA)
    bell = _hung(tmp_path, queue)
    for n in range(3):
        queue.append([{"n": n}])
        assert _rung(bell)
        other.append([{"n": n}])
        assert queue.read(0, 0).num_rows == n + 1
        with pytest.raises(AlreadyExists):
            store.create_queue("q", SCHEMA)
        assert not _rung(bell)
    bell.close()


def test_what_was_rung_before_it_was_hung_goes_unheard(tmp_path: Path, store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append([{"n": 1}])
    assert not list(tmp_path.glob("*bell*")), "who is not watched needs no bell"
    bell = _hung(tmp_path, queue)
    assert not _rung(bell)
    bell.close()


def test_where_no_bell_can_be_hung_writes_are_heard(tmp_path: Path, store: penstock.Store) -> None:
    queue = store.create_queue("q", SCHEMA)
    (tmp_path / f"x.db-bell-{queue.record.queue_id}").mkdir()
    assert wakeups.listen(str(tmp_path / "x.db"), queue.record.queue_id) is None
    with queue.watch() as watch:
        for n in range(3):
            queue.append([{"n": n}])
            assert watch.wait({0: n}, 30).ends == {0: n + 1}
