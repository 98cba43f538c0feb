"""A queue, a lake of each kind, and exports between them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

import penstock
from tests.export.lakes import LAKES, Lake

SCHEMA = pa.schema([pa.field("n", pa.int64(), nullable=False), ("s", pa.string())])
Export = Begin = Callable[..., penstock.QueueExport]


@pytest.fixture
def queue(store: penstock.Store) -> penstock.Queue:
    return store.create_queue("orders", SCHEMA, partitions=2)


@pytest.fixture(params=LAKES)
def lake(request: pytest.FixtureRequest, tmp_path: Path) -> Lake:
    return LAKES[request.param](tmp_path)


@pytest.fixture
def export(store_url: str, queue: penstock.Queue, lake: Lake) -> Export:
    def made(table: str = "orders", **options: Any) -> penstock.QueueExport:
        options.setdefault("consumer", "export")
        return penstock.QueueExport("orders", store_url, lake.url, table=lake.named(table), **options)

    return made


def append(queue: penstock.Queue, *numbers: int, partition: int | None = None) -> None:
    queue.append([{"n": n, "s": str(n)} for n in numbers], partition)


@pytest.fixture
def following(export: Export) -> Iterator[Begin]:
    begun: list[tuple[penstock.QueueExport, threading.Thread]] = []

    def begin(every: float = 0, **options: Any) -> penstock.QueueExport:
        exporting = export(**options)
        thread = threading.Thread(target=exporting.follow, kwargs={"every": timedelta(seconds=every)})
        thread.start()
        begun.append((exporting, thread))
        return exporting

    yield begin
    for exporting, _ in begun:
        exporting.stop()
    for _, thread in begun:
        thread.join(30)
