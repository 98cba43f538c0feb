"""The limit that a query began with, kept beside its checkpoint: Spark keeps what was counted, and not of how many."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pyarrow import fs

from penstock.errors import CommitRefused
from penstock.spark.checkpoint import Checkpoint, redact

_FOLDER, _FILE = "penstock", "limit.json"


@dataclass(frozen=True)
class LimitRecord:
    """A limit of rows."""

    rows: int


def read_record(checkpoint: Checkpoint) -> LimitRecord | None:
    """The limit beside a checkpoint; None where a query has run without one, or none at all."""
    path = f"{checkpoint.root}/{_FOLDER}/{_FILE}"
    if checkpoint.files.get_file_info(path).type != fs.FileType.File:
        return None
    with checkpoint.files.open_input_stream(path) as stream:
        return LimitRecord(int(json.loads(bytes(stream.read()))["rows"]))


def write_record(checkpoint: Checkpoint, record: LimitRecord) -> None:
    """Keep a limit; a reader sees the old one or the new one.

    Raises
    ------
    CommitRefused
        When it cannot be written.
    """
    folder = f"{checkpoint.root}/{_FOLDER}"
    try:
        checkpoint.files.create_dir(folder, recursive=True)
        with checkpoint.files.open_output_stream(f"{folder}/{_FILE}.new") as stream:
            stream.write(json.dumps({"version": 1, "rows": record.rows}).encode())
        checkpoint.files.move(f"{folder}/{_FILE}.new", f"{folder}/{_FILE}")
    except Exception as error:
        where = redact(checkpoint.location)
        raise CommitRefused(
            f"a limit is kept beside the checkpoint, and nothing can be written at {where!r} from this Python "
            f"({type(error).__name__}): check the address and the credentials",
            checkpoint=where,
        ) from error
