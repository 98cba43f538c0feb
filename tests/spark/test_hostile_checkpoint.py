"""Checkpoint files written by somebody else: reading them fails with a named error, and takes no excessive
memory or time.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from penstock.commit.offsets import QueueOffset
from penstock.errors import CheckpointMismatchError, CommitRefusedError, PenstockError
from penstock.json_text import Json
from penstock.limits.record import read_key_record, read_record
from penstock.spark import checkpoint as checkpoints
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.limit_state import UnreadableState, rows_passed
from penstock.state import show

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture
def made(tmp_path: Path) -> Path:
    for folder in ("offsets", "commits", "penstock", "state/0/_metadata", "state/0/0"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "metadata").write_text('{"id":"00000000-0000-0000-0000-000000000000"}')
    (tmp_path / "offsets/0").write_text('v1\n{"conf":{}}\n{"a":1}')
    (tmp_path / "commits/0").write_text("v1\n{}")
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "read"),
    [
        ("metadata", DEEP, lambda found: found.query_id()),
        ("metadata", "[]", lambda found: found.query_id()),
        ("offsets/0", f"v1\n{DEEP}\n1", lambda found: found.limit_passed(0)),
        ("penstock/limit.json", DEEP, read_record),
        ("penstock/limit.json", '{"rows": {}}', read_record),
        ("penstock/limit-per.json", DEEP, read_key_record),
        ("penstock/limit-per.json", "7", read_key_record),
    ],
)
def test_malformed_files_are_refused(
    made: Path, name: str, text: str, read: Callable[[Checkpoint], object]
) -> None:
    (made / name).write_text(text)
    with pytest.raises(CommitRefusedError, match=r"is malformed"):
        read(Checkpoint(str(made)))


def test_an_offset_nested_too_deeply_is_kept_as_text(made: Path) -> None:
    (made / "offsets/0").write_text(f"v1\n{{}}\n{DEEP}")
    assert Checkpoint(str(made)).offsets(0) == [DEEP]


def test_a_file_above_the_size_limit_is_refused(made: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "MAX_FILE_BYTES", 1 << 20)
    with (made / "offsets/0").open("wb") as file:
        # Takes no room on the disk.
        file.truncate(1 << 40)
    with pytest.raises(CommitRefusedError, match="cannot be read"):
        Checkpoint(str(made)).offsets(0)


@pytest.mark.parametrize("name", ["²", "1²", "٣", "-1", "1.tmp"])
def test_files_without_a_number_as_their_name_are_not_batches(made: Path, name: str) -> None:
    (made / "offsets" / name).write_text("v1\n{}\n1")
    assert Checkpoint(str(made)).last_planned() == 0
    assert show(None, made).last_planned in (0, None)


GOOD: Json = {
    "store": "s",
    "queue": "q",
    "consumer": "c",
    "generation": 1,
    "epoch": 2,
    "from": [0],
    "to": [5],
}


@pytest.mark.parametrize(
    "change",
    [
        {"from": 7}, {"to": "abc"}, {"to": {"0": 1}}, {"from": [0, 0], "to": [1]}, {"from": [-1]},
        {"to": [True]}, {"to": [1e9]}, {"generation": "1"}, {"epoch": None}, {"queue": ["q"]},
        {"consumer": {"a": 1}}, {"store": None}, {"rowsPerTask": "9; drop"},
        {"rowsPerTask": -1},
    ],
)  # fmt: skip
def test_an_offset_with_unexpected_contents_is_refused(change: Json) -> None:
    assert QueueOffset.of(GOOD) is not None
    with pytest.raises(CheckpointMismatchError, match="not in Penstock's format"):
        QueueOffset.of({**GOOD, **change})


def block(packed: bytes, size: int, token: int = 0x20) -> bytes:
    return struct.pack("<8sBIII", b"LZ4Block", token, len(packed), size, 0) + packed


@pytest.mark.parametrize(
    "state",
    [
        pytest.param(block(b"\x0f\0\0", (1 << 32) - 1), id="one block"),
        pytest.param(block(b"", 1 << 26) * 64, id="many blocks"),
        pytest.param(block(b"\x7f\xff\xff\xff", 4, 0x10), id="a long key"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_reading_a_malformed_limit_state_allocates_no_memory_for_it(made: Path, state: bytes) -> None:
    (made / "state/0/_metadata/metadata").write_text('v1\n{"operatorInfo":{"operatorName":"globalLimit"}}')
    (made / "state/0/0/1.delta").write_bytes(state)
    with pytest.raises(UnreadableState):
        rows_passed(Checkpoint(str(made)), 0)


@pytest.mark.parametrize("name", ["metadata", "offsets/0", "commits/0", "state/0/_metadata/metadata"])
@pytest.mark.parametrize(
    "text",
    [DEEP, f"v1\n{DEEP}\n{DEEP}", 'v1\n[{"a":1}]', "v1", "", "v1\n{}\n" + json.dumps({**GOOD, "to": 1})],
)
def test_showing_a_damaged_checkpoint_raises_only_penstock_errors(made: Path, name: str, text: str) -> None:
    (made / "state/0/0/1.delta").write_bytes(b"")
    (made / name).write_text(text)
    with suppress(PenstockError):
        show(None, made).to_dict()
