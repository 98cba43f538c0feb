"""The server of a continuous query's store crashes, and loses what has not reached its disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.store.staging import StagingLost
from penstock.testing.stores import with_schema
from tests.continuous.queue_copy import Copy, Pause
from tests.support.crashing_postgres import crashing_postgres
from tests.support.postgres import answers
from tests.support.waiting import wait_until

# Delay the server's WAL writes as long as possible. "0" for wal_writer_flush_after would flush them at once.
DELAYED_WAL = {"wal_writer_delay": "10s", "wal_writer_flush_after": "1GB", "bgwriter_lru_maxpages": "0"}

_ATTEMPTS = 6


@pytest.mark.timeout(120)
def test_an_epoch_whose_staged_rows_a_crash_has_lost_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with crashing_postgres(**DELAYED_WAL) as server:
        copy = Copy(with_schema(server.url, "crash"), tmp_path)
        query = copy.add().create_query()
        copy.wait_until_committed(query)
        for _ in range(_ATTEMPTS):
            pause = Pause(monkeypatch, query.sink, "commit")
            copy.add(1)
            pause.wait_until_suspended()
            server.stop()
            server.start()
            wait_until(lambda: answers(server.url), 60, "the server answers")
            pause.resume()
            copy.wait_until_committed(query)
            # Any other commit that syncs the disk, such as that of a new safe offset, saves the staged rows.
            if StagingLost.condition in caplog.text:
                break
        assert query.stop()
        assert copy.ids() == copy.expected_ids()
        copy.close()
    assert StagingLost.condition in caplog.text
