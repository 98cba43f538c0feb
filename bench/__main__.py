"""``python -m bench [NAME …]``: run benchmarks, print their ratios, and write bench/report.md.

The report has the latest result of every benchmark.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import psycopg

from bench import (
    append,
    changes,
    delta_changes,
    delta_feed,
    delta_table,
    iceberg_changes,
    iceberg_feed,
    latency,
    limits,
    many_executors,
    modes,
    objects,
    partitions,
    postgres_feed,
    pump,
    read,
    reconcile,
    report,
    scaling,
    sizes,
    streaming,
    tables,
    taking,
)
from bench.harness import Result
from bench.scaling import Curve
from penstock.testing.stores import drop_schema, with_schema
from tests.support.postgres import start_postgres

SQLITE = "sqlite:///{folder}/store.db"
_SQLITE_NORMAL = SQLITE + "?synchronous=normal"
_SQLITE_NORMAL_NAME = "SQLite (WAL, synchronous=normal)"


def cases(pg_url: str) -> dict[str, Callable[[], Result | list[Result] | Curve]]:
    shared = with_schema(pg_url, "bench")
    curves = {f"scaling-{name}": partial(curve, shared) for name, curve in scaling.CURVES.items()}
    return curves | {
        "append-sqlite": append.sqlite,
        "append-postgres": lambda: append.postgres(pg_url),
        "read-sqlite": lambda: read.aggregate(SQLITE, "SQLite"),
        "read-postgres": lambda: read.aggregate(shared, "PostgreSQL"),
        "merged-sqlite": lambda: _compacted(SQLITE + "?synchronous=normal", "SQLite"),
        "merged-postgres": lambda: _compacted(shared, "PostgreSQL"),
        "stream-small-sqlite": lambda: streaming.small(SQLITE, "SQLite"),
        "stream-floor-sqlite": lambda: streaming.over_floor(SQLITE, "SQLite"),
        "stream-floor-postgres": lambda: streaming.over_floor(shared, "PostgreSQL"),
        "stream-large-sqlite": lambda: streaming.large(SQLITE, "SQLite"),
        "stream-small-postgres": lambda: streaming.small(shared, "PostgreSQL"),
        "stream-large-postgres": lambda: streaming.large(shared, "PostgreSQL"),
        "stream-sizes-sqlite": lambda: sizes.sizes(SQLITE, "SQLite"),
        "stream-sizes-postgres": lambda: sizes.sizes(shared, "PostgreSQL"),
        "objects": lambda: objects.objects(shared),
        "objects-modelled": lambda: many_executors.load(pg_url),
        "scaling-executors": lambda: many_executors.by_executors(pg_url),
        "scaling-object-partitions": lambda: many_executors.by_partitions(pg_url),
        "scaling-rate": lambda: many_executors.by_rate(pg_url),
        "partitions-postgres": lambda: partitions.commits(pg_url),
        "tables-upsert": lambda: tables.upsert(pg_url),
        "tables-delta": delta_table.append,
        "tables-delta-ten": lambda: delta_table.append(batches=10),
        "tables-delta-bounds": delta_table.bounds,
        "tables-delta-memory": delta_table.driver_memory,
        "tables-delta-changes": delta_changes.growth,
        "tables-iceberg-changes": iceberg_changes.growth,
        "take-queue": taking.queue,
        "worker-memory": _memory,
        "changes-stream-few": lambda: changes.stream(0.01, 6.0),
        "changes-stream-all": lambda: changes.stream(1.0, 2.5),
        "changes-stream-few-single": lambda: changes.stream(0.01, 4.0, commits=1),
        "changes-batch-few": lambda: changes.batch(0.01, 1.0),
        "changes-batch-all": lambda: changes.batch(1.0, 1.1),
        "changes-memory": changes.worker_memory,
        "feed-delta": delta_feed.feed,
        "feed-iceberg": iceberg_feed.appends,
        "feed-iceberg-rewrite": iceberg_feed.copy_on_write,
        "feed-postgres": lambda: postgres_feed.read(pg_url),
        "pump-sqlite": lambda: pump.throughput(pg_url, "SQLite"),
        "pump-postgres": lambda: pump.throughput(pg_url, "PostgreSQL"),
        "pump-latency-sqlite": lambda: pump.latency(pg_url, "SQLite"),
        "reconcile-postgres": lambda: reconcile.postgres(pg_url),
        "reconcile-delta": lambda: reconcile.delta(pg_url),
        "pump-latency-postgres": lambda: pump.latency(pg_url, "PostgreSQL"),
        "feed-postgres-spark": lambda: postgres_feed.through_spark(pg_url),
        "modes-check": modes.check,
        "limit-stop": limits.stop,
        "limit-per-key": limits.per_key,
        "latency-sqlite": lambda: latency.at_least_once(
            _SQLITE_NORMAL, _SQLITE_NORMAL_NAME, p50=2.6, p99=11.5
        ),
        "latency-sqlite-exactly": lambda: latency.exactly_once(_SQLITE_NORMAL, _SQLITE_NORMAL_NAME),
        "latency-postgres": lambda: latency.at_least_once(shared, "PostgreSQL", p50=6.0, p99=20.0),
        "latency-postgres-exactly": lambda: latency.exactly_once(shared, "PostgreSQL"),
        "latency-rates": lambda: latency.rates({_SQLITE_NORMAL_NAME: _SQLITE_NORMAL, "PostgreSQL": shared}),
        "latency-intervals": lambda: latency.intervals(
            {_SQLITE_NORMAL_NAME: _SQLITE_NORMAL, "PostgreSQL": shared}
        ),
        "rest-sqlite": lambda: latency.idle(_SQLITE_NORMAL, _SQLITE_NORMAL_NAME),
        "rest-postgres": lambda: latency.idle(shared, "PostgreSQL"),
        "latency-backlog": lambda: latency.backlog(_SQLITE_NORMAL, "SQLite"),
    }


def _compacted(url: str, name: str) -> Result:
    result, seconds = read.compacted(url, name)
    return Result(**{**vars(result), "note": f"merge took {seconds:.2f} s"})


def _memory() -> Result:
    peak = read.worker_memory() / 2**20
    return Result(
        "worker reads 10M rows, peak memory", peak, None, None, "<= 500 MiB", peak <= 500, unit="MiB"
    )


@contextmanager
def _server() -> Iterator[str]:
    url = os.environ.get("PENSTOCK_TEST_PG_URL")
    if url:
        yield url
        return
    server = start_postgres(fsync=True)
    try:
        yield server.url
    finally:
        server.stop()


def _version(pg_url: str) -> str:
    with psycopg.connect(pg_url) as connection:
        return str(connection.info.parameter_status("server_version")).split()[0]


def main(names: list[str]) -> int:
    all_met = True
    with _server() as pg_url:
        findings = report.Findings.read(Path("bench/report.json"), report.machine(_version(pg_url)))
        benchmarks = cases(pg_url)
        if unknown := set(names) - benchmarks.keys():
            print(
                f"no benchmark {', '.join(sorted(unknown))}; there are {', '.join(benchmarks)}",
                file=sys.stderr,
            )
            return 2
        for name in names or benchmarks:
            results = benchmarks[name]()
            if isinstance(results, Result):
                results = [results]
            findings.add(name, results)
            if isinstance(results, Curve):
                print(results.text(), flush=True)
                continue
            for result in results:
                all_met = all_met and result.met
                print(result.line(), flush=True)
        drop_schema(pg_url, "bench")
    report.write(findings, Path("bench"))
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
