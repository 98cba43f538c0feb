"""What a snapshot says about queues, and about dead letters in them."""

from __future__ import annotations

import time
from datetime import datetime

import pytest

import penstock
from penstock.feeds.contract import DEAD_LETTERS
from penstock.ui import queues
from penstock.ui.snapshots import Collector
from tests.ui.filled import ODD, SCHEMA, rows


def test_a_queue_is_described_as_in_the_store(collector: Collector, store: penstock.Store) -> None:
    retention = penstock.Retention(rows=1000)
    queue = store.create_queue(ODD, SCHEMA, partitions=2, key=["customer"], retention=retention)
    queue.append(rows(20))
    (seen,) = collector.collect()["queues"]
    info = queue.info()
    assert (seen["name"], seen["rows"], seen["bytes"], seen["key"]) == (ODD, 20, info.bytes, ["customer"])
    assert seen["keeps"] == {"rows": 1000, "age_seconds": None, "bytes": None}
    appended = max(part.last_append for part in info.partitions if part.last_append)
    assert datetime.fromisoformat(seen["last_append_at"]) <= appended
    assert 0 <= seen["oldest_seconds"] < 60
    assert [(part["first_index"], part["next_index"], part["segments"]) for part in seen["partitions"]] == [
        (part.first_index, part.next_index, part.segments) for part in info.partitions
    ]
    assert (seen["rows_per_second"], seen["bytes_per_second"], seen["history"]) == (None, None, [])


def test_rates_are_calculated_from_the_growth_between_two_snapshots(
    collector: Collector, store: penstock.Store
) -> None:
    queue = store.create_queue("q", SCHEMA)
    queue.append(rows(5))
    first = datetime.fromisoformat(collector.collect()["taken_at"])
    queue.append(rows(100))
    queue.trim(0, 5)
    found = collector.collect()
    (seen,) = found["queues"]
    seconds = (datetime.fromisoformat(found["taken_at"]) - first).total_seconds()
    assert seen["rows_per_second"] * seconds == pytest.approx(100, rel=0.1, abs=100 * 0.002 / seconds)
    assert seen["bytes_per_second"] == pytest.approx(
        seen["rows_per_second"] * seen["bytes"] / seen["rows"], rel=0.01
    )
    assert [point["rows_per_second"] for point in seen["history"]] == [seen["rows_per_second"]]
    (seen,) = collector.collect()["queues"]
    assert seen["rows_per_second"] == 0


def test_a_recreated_queue_has_no_history(collector: Collector, store: penstock.Store) -> None:
    for _ in range(2):
        store.create_queue("q", SCHEMA).append(rows(50))
        collector.collect()
        assert collector.collect()["queues"][0]["rows_per_second"] == 0
        store.drop_queue("q")


def test_dead_letters_are_listed_with_the_newest(
    collector: Collector, store: penstock.Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.create_queue("plain", SCHEMA)
    queue = store.create_queue("refused", DEAD_LETTERS, partitions=2)
    place = {"topic": "t", "partition": 0, "offset": 1}
    for number in range(7):
        value = None if number == 6 else f"<b>{number}</b>" + "x" * 500
        queue.append([{"reason": f"bad {number}", "value": value, **place}], partition=number % 2)
    (seen,) = collector.collect()["dead_letters"]
    assert (seen["queue"], seen["rows"]) == ("refused", 7)
    assert [each["reason"] for each in seen["newest"]] == [f"bad {number}" for number in (6, 5, 4, 3, 2)]
    assert seen["newest"][0]["value"] is None
    assert seen["newest"][1]["value"] == ("<b>5</b>" + "x" * 500)[:200]
    assert seen["newest"][0]["at"] == seen["last_append_at"]

    def read(*_: object, **__: object) -> None:
        raise AssertionError("payloads are read again")

    monkeypatch.setattr(queues.reading, "read", read)
    assert collector.collect()["dead_letters"] == [seen]


def test_a_dead_letter_is_shown_without_secrets_in_its_reason_and_with_its_original_value(
    collector: Collector, store: penstock.Store
) -> None:
    queue = store.create_queue("refused", DEAD_LETTERS)
    place = {"topic": "t", "partition": 0, "offset": 1}
    value = '{"password": "hunter22", "token": "t0ps3cret"}'
    own = store.database.url.secrets
    reasons = [
        "postgresql://app:hunter22@db/shop does not answer",
        f"at {store.url}: token=t0ps3cret,\n  and {' '.join(own)} is wrong",
        "password = hunter22",
        # Were it cut first, a half of the password would be seen.
        "x" * 150 + " postgresql://app:" + "h" * 100 + "@db",
        "secret" * 100_000,
    ]
    for reason in reasons:
        queue.append([{"reason": reason, "value": value, **place}])
    began = time.perf_counter()
    (seen,) = collector.collect()["dead_letters"]
    assert time.perf_counter() - began < 5
    long, cut, words, two_lines, url = [each["reason"] for each in seen["newest"]]
    assert url == "postgresql://app:***@db/shop does not answer"
    assert two_lines == f"at {store.url}: token=***, and {' '.join('***' for _ in own)} is wrong".replace(
        "  ", " "
    )
    assert words == "password =***"
    assert cut == "x" * 150 + " postgresql://app:***@db"
    assert len(long) == 200
    assert {each["value"] for each in seen["newest"]} == {value}
