"""The limit that a query began with, kept beside its checkpoint: Spark keeps what was counted, and not of how many."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.errors import CommitRefused
from penstock.json_text import parse_json
from penstock.spark.checkpoint import Checkpoint, redact

T = TypeVar("T")
_FOLDER, _FILE = "penstock", "limit.json"


@dataclass(frozen=True)
class LimitRecord:
    """A limit of rows."""

    rows: int


def read_record(checkpoint: Checkpoint) -> LimitRecord | None:
    """The limit beside a checkpoint; None where a query has run without one, or none at all."""
    return read_beside(checkpoint, _FILE, lambda found: LimitRecord(int(found["rows"])))


def read_beside(checkpoint: Checkpoint, name: str, made: Callable[[Any], T]) -> T | None:
    """What a file of a limit keeps; None where there is none.

    Parameters
    ----------
    made
        Gets the JSON in it.

    Raises
    ------
    CommitRefused
        When it is not as a limit writes it.
    """
    found = checkpoint.read(f"{_FOLDER}/{name}")
    try:
        return None if found is None else made(parse_json(found))
    except (ValueError, KeyError, TypeError) as error:
        where = redact(checkpoint.location)
        raise CommitRefused(
            f"the file {_FOLDER}/{name} of the checkpoint at {where!r} is not as a limit writes it ({type(error).__name__}): bring it "
            "back from a copy, or start with a new checkpoint",
            checkpoint=where,
        ) from error


def write_record(checkpoint: Checkpoint, record: LimitRecord) -> None:
    """Keep a limit; a reader sees the old one or the new one.

    Raises
    ------
    CommitRefused
        When it cannot be written.
    """
    write_beside(checkpoint, _FILE, {"version": 1, "rows": record.rows})


def write_beside(checkpoint: Checkpoint, name: str, content: Mapping[str, Any]) -> None:
    """Keep a file of a limit, as JSON; a reader sees the old one or the new one.

    Raises
    ------
    CommitRefused
        When it cannot be written.
    """
    folder = f"{checkpoint.root}/{_FOLDER}"
    try:
        checkpoint.files.create_dir(folder, recursive=True)
        with checkpoint.files.open_output_stream(f"{folder}/{name}.new") as stream:
            stream.write(json.dumps(content).encode())
        checkpoint.files.move(f"{folder}/{name}.new", f"{folder}/{name}")
    except Exception as error:
        where = redact(checkpoint.location)
        raise CommitRefused(
            f"a limit is kept beside the checkpoint, and nothing can be written at {where!r} from this Python "
            f"({type(error).__name__}): check the address and the credentials",
            checkpoint=where,
        ) from error
