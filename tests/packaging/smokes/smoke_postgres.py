"""A store in PostgreSQL, whose URL is given."""

from __future__ import annotations

import sys

import pyarrow as pa
from asking import THERE, needs

import penstock

(url,) = sys.argv[1:]
with penstock.connect(url) as store:
    orders = store.create_queue("orders", pa.schema([("id", pa.int64())]), partitions=2)
    orders.append([{"id": number} for number in range(100)])
    billing = store.create_consumer("billing")
    billing.register("orders")
    with orders.watch() as watch:
        orders.append([{"id": 100}], partition=0)
        assert watch.wait({0: 50, 1: 50}, timeout=30)
    assert billing.lag("orders").rows == 101
    store.drop_queue("orders")
    store.drop_consumer("billing")
if "pump" not in THERE:
    # It has the package that the feed asks for.
    needs("spark", lambda: penstock.PostgresFeed)
