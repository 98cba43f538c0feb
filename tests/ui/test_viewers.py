"""Viewers of the page: the snapshots that they get, and what they cost the store."""

from __future__ import annotations

import asyncio
import threading

import httpx
import pytest

import penstock
from penstock.ui import snapshots
from penstock.ui.snapshots import Collector
from tests.support.spark_queues import one_store
from tests.support.waiting import wait_until
from tests.ui.filled import ODD, fill
from tests.ui.served import Serve, events


@one_store
def test_events_start_immediately_and_continue(serve: Serve, store: penstock.Store) -> None:
    fill(store)
    served = serve()
    with httpx.stream("GET", served.url + "api/events", timeout=30) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        found = events(answer.iter_lines())
        first = next(found)
        store.queue(ODD).append([{"id": 2}])
        later = next(each for each in found if each["queues"][0]["rows"] == 2)
    assert first["queues"][0]["rows"] == 1
    assert later["taken_at"] > first["taken_at"]


@one_store
def test_a_disconnected_viewer_is_forgotten_and_nothing_is_collected_without_viewers(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self: looks.append(1) or real(self))
    served = serve(every=0.1)
    assert looks == []
    counts = []

    def view() -> None:
        with httpx.stream("GET", served.url + "api/events", timeout=30) as answer:
            found = events(answer.iter_lines())
            counts.append(sum(1 for _, _ in zip(range(6), found, strict=False)))

    viewers = [threading.Thread(target=view) for _ in range(3)]
    for each in viewers:
        each.start()
    for each in viewers:
        each.join(30)
    assert counts == [6, 6, 6]
    wait_until(lambda: served.server.stream.viewers == 0, message="all viewers are gone")
    before = len(looks)
    threading.Event().wait(0.4)
    assert len(looks) == before


@one_store
def test_concurrent_requests_share_one_snapshot(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[int] = []
    real = Collector.collect
    monkeypatch.setattr(Collector, "collect", lambda self: looks.append(1) or real(self))

    async def ask() -> set[bytes]:
        shared = snapshots.SnapshotStream(collector, every=3600)
        at_once = await asyncio.gather(*(shared.newest() for _ in range(5)))
        return {taken.text for taken in [*at_once, await shared.newest()]}

    assert len(asyncio.run(ask())) == 1
    assert looks == [1]


@one_store
def test_the_number_of_viewers_is_limited(serve: Serve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(snapshots, "MAX_VIEWERS", 1)
    served = serve()
    with httpx.stream("GET", served.url + "api/events", timeout=10) as answer:
        found = events(answer.iter_lines())
        next(found)
        assert served.get("/api/events").status_code == 503


@one_store
def test_the_server_stops_while_viewers_are_connected(serve: Serve) -> None:
    served = serve(every=30)
    with httpx.stream("GET", served.url + "api/events", timeout=30) as answer:
        found = events(answer.iter_lines())
        next(found)
        served.end()
        assert list(found) == []
