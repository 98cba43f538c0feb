"""Sample snapshot of a shop's store in the format of `penstock ui`, for the screenshots of the documentation.

It is the same at every call.
"""

from __future__ import annotations

import json
import math
import random
from datetime import UTC, datetime, timedelta
from typing import Any

from penstock.ui.history import Percentiles
from penstock.ui.queries import RECENT_BATCHES

NOW = datetime(2026, 3, 10, 13, 24, 7, tzinfo=UTC)
POINTS = 240
Point = dict[str, Any]


def iso(seconds_ago: float) -> str:
    time = NOW - timedelta(seconds=seconds_ago)
    return time.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def wave_values(base: float, swing: float, seed: int, *, noise: float = 0.08) -> list[float]:
    """Return values around `base` in two waves."""
    rng = random.Random(seed)
    waves = (math.sin((i / POINTS) * 4 * math.pi + seed) for i in range(POINTS))
    return [max(0.0, base * (1 + swing * wave + rng.gauss(0, noise))) for wave in waves]


def times(interval: float = 3.0) -> list[str]:
    return [iso((POINTS - 1 - i) * interval) for i in range(POINTS)]


def queue(
    name: str,
    rows: int,
    row_bytes: float,
    rate: float,
    *,
    partitions: int = 1,
    key: tuple[str, ...] = (),
    days: float | None = None,
    seed: int = 0,
) -> Point:
    rates = wave_values(rate, 0.25, seed)
    age_seconds = 86_400 * (days or 41.3)
    partition_rows = rows // partitions
    trimmed = 0 if days is None else partition_rows * 3
    return {
        "name": name,
        "rows": partition_rows * partitions,
        "bytes": round(partition_rows * partitions * row_bytes),
        "rows_per_second": round(rates[-1], 1),
        "bytes_per_second": round(rates[-1] * row_bytes, 1),
        "oldest_at": iso(age_seconds),
        "oldest_seconds": age_seconds,
        "last_append_at": iso(0.2 if rate else 5_140),
        "key": list(key),
        "keeps": {"rows": None, "age_seconds": None if days is None else days * 86_400, "bytes": None},
        "partitions": [
            {
                "partition": i,
                "first_index": trimmed + 977 * i,
                "next_index": trimmed + 977 * i + partition_rows,
                "rows": partition_rows,
                "bytes": round(partition_rows * row_bytes),
                "segments": 37 + 5 * i,
                "oldest_at": iso(age_seconds - 61 * i),
            }
            for i in range(partitions)
        ],
        "history": [
            {"at": at, "rows_per_second": round(value, 1)} for at, value in zip(times(), rates, strict=True)
        ],
    }


def consumer(
    name: str,
    source: Point,
    lags: list[float],
    seconds: float,
    *,
    app: str | None,
    vital: bool = False,
    alive: bool = True,
    stuck: float | None = None,
) -> Point:
    lag = round(lags[-1])
    share = -(-lag // len(source["partitions"]))
    return {
        "consumer": name,
        "queue": source["name"],
        "vital": vital,
        "lag_rows": lag,
        "lag_bytes": round(lag * source["bytes"] / max(source["rows"], 1)),
        "lag_seconds": seconds if lag else 0.0,
        "owner": app and {"app_id": app, "query": OWNERS[app], "epoch": 4, "alive": alive},
        "stuck": stuck is not None,
        "stuck_seconds": stuck,
        "partitions": [
            {
                "partition": part["partition"],
                "offset": part["next_index"] - share,
                "safe_offset": part["next_index"] - share,
                "next_index": part["next_index"],
                "lag_rows": share,
            }
            for part in source["partitions"]
        ],
        "history": [{"at": at, "lag_rows": round(value)} for at, value in zip(times(), lags, strict=True)],
    }


def app_id(number: int) -> str:
    rng = random.Random(number)
    digits = "".join(rng.choices("0123456789abcdef", k=32))
    return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


OWNERS = {
    app_id(1): "shipments",
    app_id(2): "sessions",
    app_id(3): "customer-totals",
    app_id(4): "fraud-alerts",
    app_id(5): "large-orders",
}


def query(
    number: int, name: str, engine: str, state: str, batch: int, *, silent: float = 0.0, **fields: Any
) -> Point:
    return {
        "id": app_id(number),
        "run_id": app_id(100 + number),
        "name": name,
        "engine": engine,
        "state": state,
        "batch": batch,
        "unit": "epoch" if engine == "continuous" else "batch",
        "rows_in": None,
        "rows_out": None,
        "rows_in_per_second": None,
        "latency_ms": None,
        "batch_duration_ms": None,
        "duration_ms": None,
        "watermark": None,
        "finalized_until": None,
        "state_rows": None,
        "state_bytes": None,
        "last_error": None,
        "spark_ui": f"http://spark-{number}.internal:4040",
        "checkpoint": f"/data/checkpoints/{name}",
        "source": None,
        "sink": None,
        "started_at": iso(86_400 * 2.6 + number * 1_000),
        "updated_at": iso(0.4 + silent),
        "history": [],
        **fields,
    }


def points(
    seed: int, rows: float, output_share: float, duration: float, latency: float | None, state: float | None
) -> list[Point]:
    rows_in = wave_values(rows, 0.25, seed)
    durations = [round(value, 1) for value in wave_values(duration, 0.12, seed + 1, noise=0.05)]
    median_latencies = wave_values(latency or 0, 0.06, seed + 2, noise=0.07)
    max_latencies = wave_values((latency or 0) * 2.7, 0.2, seed + 3, noise=0.09)
    batches = percentiles(durations) if latency is None else [dict[str, float]()] * POINTS
    return [
        {
            "at": at,
            "rows_in": round(rows_in[i]),
            "rows_out": round(rows_in[i] * output_share),
            "p50": latency and round(median_latencies[i], 2),
            "p99": latency and round(max(max_latencies[i], median_latencies[i] * 1.2), 2),
            "batch_p50": batches[i].get("p50"),
            "batch_p99": batches[i].get("p99"),
            "duration_ms": durations[i],
            "state_rows": state and round(state * (0.86 + 0.14 * i / POINTS)),
        }
        for i, at in enumerate(times())
    ]


def percentiles(durations: list[float]) -> list[dict[str, float | None]]:
    """Return the percentiles of recent durations after each micro-batch."""
    recent, summaries = Percentiles(RECENT_BATCHES), []
    for duration in durations:
        recent.add(duration)
        summaries.append(recent.summary())
    return summaries


def last_batch(history: list[Point], every: float) -> Point:
    """Return the fields that a query reports about its last batch, from the newest point."""
    newest = history[-1]
    p50, p99 = newest["p50"], newest["p99"]
    latency = p50 and {"p50": p50, "p90": round((p50 + p99) / 2, 2), "p99": p99, "max": round(p99 * 1.6, 2)}
    return {
        "rows_in": newest["rows_in"],
        "rows_out": newest["rows_out"],
        "rows_in_per_second": newest["rows_in"] / every,
        "latency_ms": latency,
        "batch_duration_ms": None
        if latency
        else percentiles([point["duration_ms"] for point in history])[-1],
        "state_rows": newest["state_rows"],
        "state_bytes": newest["state_rows"] and newest["state_rows"] * 96,
        "history": history,
    }


def phases(duration: float) -> dict[str, float]:
    shares = {
        "triggerExecution": 1,
        "addBatch": 0.71,
        "walCommit": 0.09,
        "commitOffsets": 0.08,
        "queryPlanning": 0.06,
    }
    return {name: round(duration * share) for name, share in shares.items()}


def queries() -> list[Point]:
    totals = points(11, 5_600, 0.4, 412, None, 1_830_000)
    alerts = points(12, 380, 0.07, 100, 1.7, None)
    large = points(13, 1_900, 0.31, 236, None, None)
    sessions = points(14, 9_100, 0.2, 640, None, 402_000)
    message = (
        "consumer 'warehouse' on queue 'orders' stands at {0: 36402117, 1: 36402903}, and this query's "
        "checkpoint at {0: 36401702, 1: 36402903}: another program moved it. Start the query with a new "
        "checkpoint, and it resumes at the consumer's offset"
    )
    return [
        query(
            1,
            "shipments",
            "micro-batch",
            "failed",
            8_112,
            silent=1_940,
            source="queue 'orders'",
            sink="table 'shipments'",
            last_error={"condition": "OFFSET_CONFLICT", "message": message, "at": iso(1_940)},
        ),
        query(
            2,
            "sessions",
            "micro-batch",
            "silent",
            20_417,
            silent=312,
            source="queue 'clicks'",
            sink="DeltaSink[/data/sessions]",
            watermark=iso(930),
            duration_ms=phases(640),
            **last_batch(sessions, 10),
        ),
        query(
            3,
            "customer-totals",
            "micro-batch",
            "running",
            41_208,
            source="queue 'orders'",
            sink="table 'customer_totals'",
            watermark=iso(603),
            duration_ms=phases(totals[-1]["duration_ms"]),
            **last_batch(totals, 5),
        ),
        query(
            4,
            "fraud-alerts",
            "continuous",
            "running",
            918_330,
            source="queue 'payments'",
            sink="queue 'alerts'",
            duration_ms={"epoch": alerts[-1]["duration_ms"]},
            **last_batch(alerts, 1),
        ),
        query(
            5,
            "large-orders",
            "micro-batch",
            "running",
            77_019,
            source="queue 'orders'",
            sink="queue 'large'",
            duration_ms=phases(large[-1]["duration_ms"]),
            **last_batch(large, 2),
        ),
        query(6, "nightly-export", "micro-batch", "stopped", 301, silent=37_800),
    ]


def ledger() -> list[Point]:
    sinks = [
        ("large", 5, 77_019, 2.0, 590),
        ("alerts", 4, 918_330, 0.1, 27),
        ("customer_totals", 3, 41_208, 5.0, 2_240),
    ]
    commits = [
        {
            "sink": sink,
            "app_id": app_id(number),
            "query": OWNERS[app_id(number)],
            "batch": batch - i,
            "rows": rows + 13 * ((i * 7) % 11),
            "committed_at": iso(0.05 + i * every),
        }
        for sink, number, batch, every, rows in sinks
        for i in range(20)
    ]
    return sorted(commits, key=lambda row: str(row["committed_at"]), reverse=True)[:50]


def snapshot() -> Point:
    """Return a snapshot in the format of `/api/snapshot`."""
    orders = queue("orders", 48_211_904, 41, 958, partitions=4, key=("customer",), days=30, seed=1)
    clicks = queue("clicks", 512_870_112, 22, 6_240, partitions=8, key=("session",), days=3, seed=2)
    payments = queue("payments", 20_118_340, 57, 391, partitions=2, key=("card",), days=30, seed=3)
    alerts = queue("alerts", 61_412, 88, 27, seed=4, days=90)
    large = queue("large", 14_902_118, 24, 296, seed=5)
    refused = queue("refused", 12, 410, 0)
    stuck_lags = [max(0.0, 957 * 3 * (i - 14)) for i in range(POINTS)]
    return {
        "version": "0.1.0",
        "taken_at": iso(0),
        "every_seconds": 1.0,
        "store": {"url": "postgresql://penstock@db.internal/shop", "kind": "postgresql", "error": None},
        "queues": [alerts, clicks, large, orders, payments, refused],
        "consumers": [
            consumer(
                "warehouse", orders, stuck_lags, 676, app=app_id(1), vital=True, alive=False, stuck=674.0
            ),
            consumer(
                "sessions", clicks, wave_values(1_960_000, 0.3, 8, noise=0.02), 312, app=app_id(2), alive=True
            ),
            consumer("totals", orders, wave_values(5_300, 0.3, 6), 5.1, app=app_id(3), vital=True),
            consumer("large-orders", orders, wave_values(1_800, 0.3, 7), 1.9, app=app_id(5), vital=True),
            consumer("fraud", payments, wave_values(19, 0.2, 9), 0.08, app=app_id(4), vital=True),
            consumer("pager", alerts, [0.0] * POINTS, 0, app=None),
        ],
        "queries": queries(),
        "ledger": ledger(),
        "dead_letters": [
            {
                "queue": "refused",
                "rows": 12,
                "last_append_at": iso(5_140),
                "newest": [
                    {
                        "at": iso(5_140 + 380 * i),
                        "reason": f"column amount: {value!r} is no number",
                        "value": json.dumps({"op": "u", "after": {"id": 88_213 + i, "amount": value}}),
                    }
                    for i, value in enumerate(["12,50", "n/a", "9.90 EUR", "", "12,50"])
                ],
            }
        ],
        "notes": [],
    }
