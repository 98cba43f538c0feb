"""What tells the rows of an Iceberg table apart."""

from __future__ import annotations

import pyarrow as pa
import pytest

from penstock.errors import FeedUnavailable
from tests.feeds.iceberg.lake import Lake


def test_a_table_of_maps_alone_has_no_row_id(lake: Lake) -> None:
    lake.table("maps", pa.schema([("m", pa.map_(pa.string(), pa.int64()))]))
    with pytest.raises(FeedUnavailable, match="add a column") as caught:
        lake.feed("maps").open().describe()
    assert caught.value.condition == "FEED_UNAVAILABLE.NO_ROW_ID"
