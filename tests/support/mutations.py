"""Random damage to the data that Penstock reads.

Each reader must return a result or raise an error of Penstock. ``python -m tests.support.mutations
segments|sqlite|postgresql|checkpoints FOLDER FIRST COUNT`` applies COUNT mutations from number FIRST on, and
prints a line for each one that causes another error. It is a separate process, so that crashes are detected.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import struct
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa

import penstock
from penstock.arrow.segments import decode, decode_each, encode, read_stored_table
from penstock.errors import PenstockError, StoreError
from tests.support import mutated_stores
from tests.support.mutated_values import TEXTS, mutate_bytes
from tests.support.store_readers import command, read_page

# Segments.


def segments() -> list[tuple[bytes, pa.Schema]]:
    """Return segments of all types, tiny and compressed ones."""
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
    encoded = []
    for times in (1, 50, 3000):
        batch = pa.concat_tables([table] * times).combine_chunks().to_batches()[0]
        for part in (batch, *(batch.select([name]) for name in columns)):
            encoded.append((encode(part).to_pybytes(), part.schema))
    return encoded


def _convert(batch: pa.RecordBatch | pa.Table) -> None:
    # Text that is not UTF-8 and dates outside Python's range are errors of whoever reads the rows.
    with contextlib.suppress(ValueError, OverflowError):
        if batch.num_rows <= 20_000:
            batch.to_pylist()


def damage_segments(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    originals = segments()
    for number in numbers:
        rng = random.Random(number)
        payload, schema = rng.choice(originals)
        damaged = mutate_bytes(rng, payload)
        stream = schema.serialize().to_pybytes() + damaged + struct.pack("<Ii", 0xFFFFFFFF, 0)
        for read, expected in (
            (lambda data=damaged, schema=schema: decode(data, schema), StoreError),
            (lambda data=damaged, schema=schema: decode(data, schema, schema.names[:1]), StoreError),
            (lambda data=damaged, schema=schema: next(decode_each([data], schema)), StoreError),
            (lambda data=stream: read_stored_table(data), ValueError),
        ):
            try:
                _convert(read())
            except expected:
                pass
            except Exception:
                yield number, traceback.format_exc()


# Checkpoints: one file is damaged in a copy of a checkpoint of the folder.


def damage_checkpoints(folder: Path, numbers: range) -> Iterator[tuple[int, str]]:
    originals = sorted(
        path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("damaged")
    )
    store = folder / "empty.db"
    if not store.exists():
        penstock.connect(f"sqlite:///{store}").close()
    damaged = folder / f"damaged-{numbers.start}"
    for number in numbers:
        rng = random.Random(number)
        shutil.rmtree(damaged, ignore_errors=True)
        shutil.copytree(rng.choice(originals), damaged)
        file = rng.choice(sorted(path for path in damaged.rglob("*") if path.is_file()))
        data = file.read_bytes()
        lines = data.split(b"\n")
        if rng.random() < 0.3:
            lines[rng.randrange(len(lines))] = rng.choice(TEXTS).encode()
            file.write_bytes(b"\n".join(lines))
        else:
            file.write_bytes(mutate_bytes(rng, data))

        calls = [lambda: read_page(f"sqlite:///{store}", [str(damaged)])]
        # The command starts Spark.
        calls += [lambda: command("checkpoint", "show", str(damaged))] if number % 20 == 0 else []
        for call in calls:
            try:
                call()
            except PenstockError:
                pass
            except Exception:
                yield number, f"{file.relative_to(damaged)}\n{traceback.format_exc()}"
    shutil.rmtree(damaged, ignore_errors=True)


KINDS = {
    "segments": damage_segments,
    "sqlite": mutated_stores.damage_sqlite,
    "postgresql": mutated_stores.damage_postgresql,
    "checkpoints": damage_checkpoints,
}


def _peak_mib() -> int:
    # The resource usage that the kernel counts begins with the memory of the parent process.
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0]) >> 10


def main(arguments: list[str]) -> int:
    kind, folder, first, count = arguments
    failures = 0
    numbers = range(int(first), int(first) + int(count))
    for number, description in KINDS[kind](Path(folder), numbers):
        failures += 1
        print(f"{kind} {number}: {description}", flush=True)
    print(f"{len(numbers)} mutations, {failures} failed, peak memory {_peak_mib()} MiB")
    return int(failures > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
