"""The server of a continuous query's store crashes, with what has not reached its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.store.staging import StagingLost
from penstock.testing.stores import with_schema
from tests.continuous.copying import Copy, Pause
from tests.support.crashing_postgres import crashing_postgres
from tests.support.postgres import answers
from tests.support.waiting import wait_until

# The server writes its log as late as it can: "0" for wal_writer_flush_after would write it at once.
LATE = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "bgwriter_lru_maxpages": "0"}

_TRIES = 6


@pytest.mark.timeout(120)
def test_an_epoch_whose_staged_rows_a_crash_has_lost_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with crashing_postgres(**LATE) as server:
        copy = Copy(with_schema(server.url, "crash"), tmp_path)
        query = copy.add().query()
        copy.through(query)
        for _ in range(_TRIES):
            committing = Pause(monkeypatch, query.sink, "commit")
            copy.add(1)
            committing.reached()
            server.stop()
            server.start()
            wait_until(lambda: answers(server.url), 60, "the server answers")
            committing.wake()
            copy.through(query)
            # Anything else that waits for the disk, such as a new safe offset, keeps the staged rows, too.
            if StagingLost.condition in caplog.text:
                break
        assert query.stop()
        assert copy.ids() == copy.all()
        copy.close()
    assert StagingLost.condition in caplog.text
