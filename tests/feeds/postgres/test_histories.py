"""Tables that change at random while a stream reads them: the copy equals the source, or the stream
was ended before with a named error.
"""

from __future__ import annotations

import os

import pytest

from tests.feeds.postgres.schema_histories import play_many


def test_a_copy_follows_changing_tables(logical_pg_url: str) -> None:
    play_many(logical_pg_url, 20, first=1)


@pytest.mark.soak
@pytest.mark.timeout(0)
def test_many_copies_follow_changing_tables(logical_pg_url: str) -> None:
    """PENSTOCK_SCHEMA_HISTORIES sets their number."""
    play_many(logical_pg_url, int(os.environ.get("PENSTOCK_SCHEMA_HISTORIES", "2000")))
