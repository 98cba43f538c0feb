"""The count of Spark's limit, read from the files of its state store."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pytest

from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.limit_state import UnreadableState, rows_passed

# What Spark 4.3.0 wrote: a delta with the count 2, and one without a change.
TWO = bytes.fromhex(
    "4c5a34426c6f636b251a0000002c0000004188a30b6d0000001001000100141012"
    "00c00200000000000000ffffffff4c5a34426c6f636b15000000000000000000000000"
)
UNCHANGED = bytes.fromhex(
    "4c5a34426c6f636b150400000004000000db804d08ffffffff4c5a34426c6f636b15000000000000000000000000"
)
METADATA = 'v1\n{"operatorInfo":{"operatorId":%d,"operatorName":"%s"},"stateStoreInfo":[]}'


def checkpoint(folder: Path, files: dict[str, bytes], *names: str) -> Checkpoint:
    """One with some operators, and files of the last one."""
    for number, name in enumerate(names or ("globalLimit",)):
        about = folder / f"state/{number}/_metadata/metadata"
        about.parent.mkdir(parents=True)
        about.write_text(METADATA % (number, name))
        store = about.parent.parent / "0"
        store.mkdir()
    for name, content in files.items():
        (store / name).write_bytes(content)
    return Checkpoint(str(folder))


def test_the_count_is_taken_from_the_newest_change(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {"1.delta": TWO, "2.delta": UNCHANGED, "3.delta": UNCHANGED})
    assert [rows_passed(found, batch) for batch in (0, 1, 2)] == [2, 2, 2]


def test_the_count_is_zero_if_no_micro_batch_changed_it(tmp_path: Path) -> None:
    assert rows_passed(checkpoint(tmp_path, {"1.delta": UNCHANGED, "2.delta": UNCHANGED}), 1) == 0


def test_a_snapshot_replaces_the_files_before_it(tmp_path: Path) -> None:
    found = checkpoint(tmp_path, {"7.snapshot": TWO, "7.delta": UNCHANGED, "8.delta": UNCHANGED})
    assert rows_passed(found, 7) == 2


def test_the_limit_is_found_among_other_operators(tmp_path: Path) -> None:
    assert rows_passed(checkpoint(tmp_path, {"1.delta": TWO}, "stateStoreSave", "globalLimit"), 0) == 2


@pytest.mark.parametrize(
    ("files", "names", "why"),
    [
        ({"2.delta": UNCHANGED}, ("globalLimit",), "no file"),
        ({"1.zip": b"PK"}, ("globalLimit",), "no file"),
        ({"1.delta": b"(\xb5/\xfd" + bytes(40)}, ("globalLimit",), "unknown compression"),
        ({"1.delta": TWO}, ("stateStoreSave",), "0 limits"),
        ({"1.delta": TWO}, ("globalLimit", "globalLimit"), "2 limits"),
        ({"1.delta": TWO[:60]}, ("globalLimit",), "error"),
    ],
)
def test_unreadable_state_is_reported(
    tmp_path: Path, files: dict[str, bytes], names: tuple[str, ...], why: str
) -> None:
    with pytest.raises(UnreadableState, match=why):
        rows_passed(checkpoint(tmp_path, files, *names), 1 if "2.delta" in files else 0)


def test_an_uncompressed_block_is_read(tmp_path: Path) -> None:
    """Spark's codec does not compress blocks that would not become smaller."""
    records = pa.Codec("lz4_raw").decompress(TWO[21:47], 44, asbytes=True)
    raw = b"LZ4Block" + bytes([0x15]) + len(records).to_bytes(4, "little") * 2 + bytes(4) + records
    assert rows_passed(checkpoint(tmp_path, {"1.delta": raw + TWO[47:]}), 0) == 2
