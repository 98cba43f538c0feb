"""Random damage to what Penstock reads, and readers that have to survive it: each of them answers, or raises
an error of Penstock's.

``python -m tests.support.mutations segments|store|checkpoints FOLDER FIRST COUNT`` plays the mutations from
number FIRST on and prints one line for each that did harm. A process of its own, so that a crash is seen.
"""

from __future__ import annotations

import contextlib
import io
import json
import random
import shutil
import sqlite3
import struct
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import pyarrow as pa

import penstock
from penstock.arrow.segments import decode, decode_each, encode, kept_table
from penstock.cli.app import run as run_command
from penstock.errors import PenstockError, StoreError
from penstock.feeds.contract import DEAD_LETTERS
from penstock.store.records import queries
from penstock.store.records.queries import QueryError, QueryProgress, QueryRun
from penstock.ui.metrics import exposition
from penstock.ui.snapshots import Collector, TakenSnapshot

INTEGERS = (0, 1, -1, 2, 127, 128, 2**16, 2**24, 2**30, 2**31 - 1, -(2**31), 2**32, 2**40, 2**62, 2**63 - 1)
TEXTS = (
    "", "x", "[" * 100_000, "{}", "[]", "[[1, 2]]", "5", "null", '"x"', '{"a": Infinity}', '{"a": 1e999}',
    '{"a": [1]}', '{"a": -1}', "x" * 100_000, "\0", "é", "http://[::1", "penstock", "running",
    "[99999999999]",
)  # fmt: skip
MOST_PAGE = 400_000
"""The most bytes of a snapshot or its metrics: this store has few rows."""
Mutation = Callable[[random.Random, Path], None]


def mutated(source: random.Random, data: bytes) -> bytes:
    """Change one to four places of some bytes."""
    damaged = bytearray(data)
    for _ in range(source.randint(1, 4)):
        if not damaged:
            return source.randbytes(8)
        place = source.randrange(len(damaged))
        kind = source.randrange(6)
        if kind == 0:
            damaged[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            damaged[place] = source.randrange(256)
        elif kind == 2:
            place -= place % 4
            damaged[place : place + 4] = struct.pack("<q", source.choice(INTEGERS))[:4]
        elif kind == 3:
            place -= place % 8
            damaged[place : place + 8] = struct.pack("<q", source.choice(INTEGERS))
        elif kind == 4:
            del damaged[place : place + source.choice((1, 4, 8, len(damaged)))]
        else:
            damaged[place:place] = damaged[:place][-source.choice((4, 8, 64)) :]
    return bytes(damaged)


# Segments.


def segments() -> list[tuple[bytes, pa.Schema]]:
    """Segments of all types: tiny ones, and compressed ones."""
    columns = {
        "n": pa.array([1, None, 3]),
        "s": pa.array(["abc", "", "ghi"]),
        "b": pa.array([b"abc", None, b"ghi"]),
        "l": pa.array([[1], [], [2, 3]], pa.list_(pa.int64())),
        "m": pa.array([[("a", 1)], None, [("c", 3)]], pa.map_(pa.string(), pa.int64())),
        "r": pa.array([{"a": "abc", "d": [1]}, None, {"a": "ghi", "d": None}]),
        "t": pa.array([True, None, False]),
        "z": pa.array([None, None, None]),
        "u": pa.array([1, 2, 3], pa.timestamp("us", tz="UTC")),
        "d": pa.array([1, 2, 3]).cast(pa.decimal128(30, 2)),
    }
    table = pa.table(columns)
    found = []
    for times in (1, 50, 3000):
        batch = pa.concat_tables([table] * times).combine_chunks().to_batches()[0]
        for part in (batch, *(batch.select([name]) for name in columns)):
            found.append((encode(part).to_pybytes(), part.schema))
    return found


def _values(batch: pa.RecordBatch | pa.Table) -> None:
    # Text that is not UTF-8, and dates that Python does not have, are the readers' of rows.
    with contextlib.suppress(ValueError, OverflowError):
        if batch.num_rows <= 20_000:
            batch.to_pylist()


def damage_segments(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    originals = segments()
    for number in numbers:
        source = random.Random(number)
        payload, schema = source.choice(originals)
        damaged = mutated(source, payload)
        stream = schema.serialize().to_pybytes() + damaged + struct.pack("<Ii", 0xFFFFFFFF, 0)
        for read, expected in (
            (lambda data=damaged, schema=schema: decode(data, schema), StoreError),
            (lambda data=damaged, schema=schema: decode(data, schema, schema.names[:1]), StoreError),
            (lambda data=damaged, schema=schema: next(decode_each([data], schema)), StoreError),
            (lambda data=stream: kept_table(data), ValueError),
        ):
            try:
                _values(read())
            except expected:
                pass
            except Exception:
                yield number, traceback.format_exc()


# Rows of a store.


def make_store(path: Path) -> None:
    with penstock.connect(f"sqlite:///{path}") as store:
        rows = pa.schema([("id", pa.int64()), ("name", pa.string())])
        for name in ("q", "other"):
            queue = store.create_queue(name, rows, partitions=2, key="id")
            for number in range(20):
                queue.append([{"id": number, "name": f"n{number}"}])
            store.create_consumer(name).register(name, vital=name == "q")
        store.queue("other").compact()
        pull = store.consumer("q").pull("q", 0)
        store.consumer("q").advance("q", 0, old=pull.start, new=pull.end)
        store.producer("q", session="web").append([{"id": 1, "name": "x"}], sequence=1)
        letter = {"reason": "r", "topic": None, "partition": None, "offset": None, "value": "v"}
        store.create_queue("dead", DEAD_LETTERS).append([letter])
        for name in ("a", "b"):
            run = QueryRun(
                name, "run", name, "continuous", 5, "queue 'q'", "queue 'other'", "/ck", "http://h:1"
            )
            latency = {"p50": 1.0, "p90": 2.0, "p99": 3.0, "max": 4.0}
            progress = QueryProgress(3, 10, 9, latency, 20.0, {"triggerExecution": 20.0}, 7, 8, 9, ("slow",))
            store.database.run(lambda tx, run=run: queries.begin(tx, run))
            for _ in range(2):
                store.database.run(lambda tx, run=run, made=progress: queries.report(tx, run, made))
        store.database.run(lambda tx, run=run: queries.end(tx, run, QueryError("BAD", "message")))


def _value(source: random.Random, old: object, kind: str) -> object:
    if isinstance(old, bytes) or kind == "BLOB":
        return mutated(source, old) if isinstance(old, bytes) else source.randbytes(20)
    if kind == "TEXT":
        if isinstance(old, str) and source.random() < 0.3:
            return mutated(source, old.encode()).decode(errors="replace")
        return source.choice(TEXTS)
    if kind == "REAL":
        return source.choice((0.0, -1.0, float("inf"), float("-inf"), 1e308, 5e-324))
    return source.choice(INTEGERS)


def damage_rows(source: random.Random, path: Path) -> str:
    """Change one to three values of the store; what was changed."""
    changed = []
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as connection:
        connection.execute("pragma ignore_check_constraints = on")
        connection.execute("pragma foreign_keys = off")
        tables = sorted(
            row[0]
            for row in connection.execute(
                "select name from sqlite_schema where type = 'table' and name like 'penstock_%'"
            )
        )
        filled = [name for name in tables if connection.execute(f"select count(*) from {name}").fetchone()[0]]
        for _ in range(source.randint(1, 3)):
            table = source.choice(filled)
            columns = connection.execute(
                f"select name, type, pk from pragma_table_info('{table}')"
            ).fetchall()
            names = [name for name, _, in_key in columns if in_key] or ["rowid"]
            column, kind, _ = source.choice(columns)
            rows = connection.execute(f"select {column}, {', '.join(names)} from {table}").fetchall()
            if not rows:
                continue
            old, *key = source.choice(rows)
            value = _value(source, old, kind)
            changed.append(f"{table}.{column} of row {key} = {str(value)[:80]!r}")
            where = " and ".join(f"{name} = ?" for name in names)
            with contextlib.suppress(sqlite3.Error, OverflowError):
                connection.execute(f"update or replace {table} set {column} = ? where {where}", (value, *key))
    return "; ".join(changed)


def _calls(path: Path) -> Iterator[Callable[[], object]]:
    url = f"sqlite:///{path}"

    def in_python() -> None:
        with penstock.connect(url, create=False) as store:
            for action in (store.queues, store.consumers, store.registrations, store.info):
                with contextlib.suppress(PenstockError):
                    action()
            for name in ("q", "other", "dead"):
                with contextlib.suppress(PenstockError):
                    queue = store.queue(name)
                    queue.info()
                    for partition in range(min(queue.partitions, 4)):
                        with contextlib.suppress(PenstockError):
                            queue.read(partition, 0, max_rows=1000)
                with contextlib.suppress(PenstockError):
                    store.consumer(name).lag(name)
                    store.consumer(name).pull(name, 0)

    def page() -> None:
        collector = Collector(url)
        try:
            for _ in range(2):
                snapshot = collector.collect()
                text = TakenSnapshot.of(snapshot).text
                json.loads(text, parse_constant=_refuse)
                metrics = exposition(snapshot)
                if max(len(text), len(metrics)) > MOST_PAGE:
                    raise AssertionError(f"{len(text)} and {len(metrics)} bytes")
                if "see the log" in str(snapshot["store"]["error"]):
                    raise AssertionError(snapshot["store"]["error"])
        finally:
            collector.close()

    yield in_python
    yield page
    for command in (
        ("queue", "list"),
        ("queue", "show", "q"),
        ("queue", "peek", "q"),
        ("queue", "peek", "other", "--json"),
        ("consumer", "list"),
        ("consumer", "lag"),
        ("query", "list"),
        ("store", "info"),
    ):
        yield lambda command=command: _command(*command, "--url", url)


def _refuse(constant: str) -> None:
    raise AssertionError(constant)


def _command(*arguments: str) -> None:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run_command(arguments)
    if code not in (0, 1) or "UNEXPECTED" in err.getvalue():
        raise AssertionError(f"{arguments} ended with {code}: {err.getvalue()[-2000:]}")


def damage_store(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    whole = folder / "whole.db"
    if not whole.exists():
        make_store(whole)
    damaged = folder / f"damaged-{numbers.start}.db"
    for number in numbers:
        source = random.Random(number)
        _forget(damaged)
        shutil.copy(whole, damaged)
        changed = damage_rows(source, damaged)
        # Python and the page each time, and one of the commands.
        in_python, page, *commands = _calls(damaged)
        for call in (in_python, page, source.choice(commands)):
            try:
                call()
            except PenstockError:
                pass
            except Exception:
                yield number, f"{changed}\n{traceback.format_exc()}"
    _forget(damaged)


def _forget(path: Path) -> None:
    for each in path.parent.glob(f"{path.name}*"):
        each.unlink()


# Checkpoints: copies of those in the folder, one file of which is damaged.


def damage_checkpoints(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    originals = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("damaged")
    )
    store = folder / "empty.db"
    if not store.exists():
        penstock.connect(f"sqlite:///{store}").close()
    damaged = folder / f"damaged-{numbers.start}"
    for number in numbers:
        source = random.Random(number)
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(source.choice(originals), damaged)
        file = source.choice(sorted(path for path in damaged.rglob("*") if path.is_file()))
        data = file.read_bytes()
        lines = data.split(b"\n")
        if source.random() < 0.3:
            lines[source.randrange(len(lines))] = source.choice(TEXTS).encode()
            file.write_bytes(b"\n".join(lines))
        else:
            file.write_bytes(mutated(source, data))

        def page() -> None:
            collector = Collector(f"sqlite:///{store}", [str(damaged)])
            snapshot = collector.collect()
            text, metrics = TakenSnapshot.of(snapshot).text, exposition(snapshot)
            collector.close()
            json.loads(text, parse_constant=_refuse)
            if max(len(text), len(metrics)) > MOST_PAGE or "see the log" in str(snapshot["store"]["error"]):
                raise AssertionError(f"{len(text)} bytes, {snapshot['store']['error']}")

        calls = [page]
        # The command starts Spark.
        calls += [lambda: _command("checkpoint", "show", str(damaged))] if number % 20 == 0 else []
        for call in calls:
            try:
                call()
            except PenstockError:
                pass
            except Exception:
                yield number, f"{file.relative_to(damaged)}\n{traceback.format_exc()}"
    shutil.rmtree(damaged, ignore_errors=True)


KINDS = {"segments": damage_segments, "store": damage_store, "checkpoints": damage_checkpoints}


def _peak_mib() -> int:
    # The resource usage that the kernel counts begins with the memory of the parent process.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10


def main(arguments: list[str]) -> int:
    kind, folder, first, count = arguments
    harmed = 0
    numbers = range(int(first), int(first) + int(count))
    for number, what in KINDS[kind](Path(folder), numbers):
        harmed += 1
        print(f"{kind} {number}: {what}", flush=True)
    print(f"{len(numbers)} mutations, {harmed} did harm, {_peak_mib()} MiB at most")
    return int(harmed > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
