"""Store limits in a query's checkpoint. Spark stores the counts of rows there, but not the limits."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from penstock.arguments import in_quotes
from penstock.errors import CheckpointMismatchError, CommitRefusedError
from penstock.json_text import Json, parse_json_object
from penstock.spark.checkpoint import LIMIT_RECORD, Checkpoint

NEW_CHECKPOINT = "start with a new checkpoint, in which a consumer's offset says where to resume"
_KEY_RECORD = "penstock/limit-per.json"

T = TypeVar("T")


@dataclass(frozen=True)
class KeyRecord:
    """A limit on the rows of each key."""

    per: tuple[str, ...]
    rows: int
    forget_ms: int | None
    kinds: tuple[str, ...] = ()
    """The kinds of the key columns, as far as the hash distinguishes them that decides where a key is
    counted. Empty if unknown.
    """

    def __str__(self) -> str:
        ttl_text = "" if self.forget_ms is None else f", ttl='{self.forget_ms} milliseconds'"
        return f"limit({self.rows}, {_per_text(self.per)}{ttl_text})"


def read_record(checkpoint: Checkpoint) -> int | None:
    """Return the limit on all rows in a checkpoint; None if its query has run without one or has never
    run.
    """
    return _read(checkpoint, LIMIT_RECORD, lambda content: int(content["rows"]))


def read_key_record(checkpoint: Checkpoint) -> KeyRecord | None:
    """Return the limit for each key in a checkpoint; None if its query has run without one or has never
    run.
    """
    return _read(
        checkpoint,
        _KEY_RECORD,
        lambda content: KeyRecord(
            tuple(map(str, content["per"])),
            int(content["rows"]),
            content["forget_ms"],
            tuple(map(str, content.get("kinds", ()))),
        ),
    )


def store_record(checkpoint: Checkpoint, rows: int) -> None:
    if read_record(checkpoint) != rows:
        _write(checkpoint, LIMIT_RECORD, {"version": 1, "rows": rows})


def store_key_record(checkpoint: Checkpoint, record: KeyRecord, *, exact: bool) -> None:
    """Store a limit for each key in the checkpoint. Call this before any micro-batch that counts rows for
    it.
    """
    before, planned = read_key_record(checkpoint), checkpoint.last_planned()
    if planned is not None and before is None:
        limit = read_record(checkpoint)
        how = "without a limit" if limit is None else f"with limit({limit})"
        raise CheckpointMismatchError(
            f"the query at {checkpoint.label!r} has run {how} before and did not count by key: "
            f"{NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.LIMIT",
            checkpoint=checkpoint.label,
        )
    if planned is not None and before is not None:
        _require_same_key(checkpoint, before, record, exact)
        changed = (before.rows, before.forget_ms) != (record.rows, record.forget_ms)
        if changed and planned != checkpoint.last_commit():
            raise limit_changed_error(checkpoint, planned, str(before), str(record))
    if record != before:
        _write(checkpoint, _KEY_RECORD, {"version": 1, **vars(record)})


def _require_same_key(checkpoint: Checkpoint, before: KeyRecord, current: KeyRecord, exact: bool) -> None:
    fold_case: Callable[[str], str] = str if exact else str.lower
    if list(map(fold_case, before.per)) != list(map(fold_case, current.per)):
        raise CheckpointMismatchError(
            f"the limit at {checkpoint.label!r} has counted rows {_per_text(before.per)}, not "
            f"{_per_text(current.per)}: with the counts of other keys it would drop rows. Instead, "
            f"{NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.LIMIT_PER",
            checkpoint=checkpoint.label,
            before=list(before.per),
            now=list(current.per),
        )
    if before.kinds and current.kinds and before.kinds != current.kinds:
        counted, given = ", ".join(before.kinds), ", ".join(current.kinds)
        raise CheckpointMismatchError(
            f"the limit at {checkpoint.label!r} has counted rows {_per_text(before.per)} as {counted}. As "
            f"{given}, their count would start again: cast them as before, or {NEW_CHECKPOINT}",
            condition="CHECKPOINT_MISMATCH.LIMIT_PER",
            checkpoint=checkpoint.label,
            before=list(before.kinds),
            now=list(current.kinds),
        )


def limit_changed_error(
    checkpoint: Checkpoint, planned: int, before: object, now: object
) -> CommitRefusedError:
    """Return the error for a limit that changes while a micro-batch with the old limit is not committed
    yet.
    """
    old_limit, new_limit = (f"limit({limit})" if isinstance(limit, int) else limit for limit in (before, now))
    return CommitRefusedError(
        f"micro-batch {planned} was started with {old_limit} but not committed. With {new_limit} it could "
        f"have other rows than the sink: start the query once with {old_limit} to finish it, then with "
        f"{new_limit}",
        condition="COMMIT_REFUSED.LIMIT_CHANGED",
        checkpoint=checkpoint.label,
        before=before,
        now=now,
    )


def _per_text(names: Sequence[str]) -> str:
    return f"per=[{', '.join(map(in_quotes, names))}]"


def _read(checkpoint: Checkpoint, name: str, parse: Callable[[Json], T]) -> T | None:
    content = checkpoint.read(name)
    try:
        return None if content is None else parse(parse_json_object(content))
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise checkpoint.malformed(name, error) from error


def _write(checkpoint: Checkpoint, name: str, content: Json) -> None:
    """Write a file atomically: readers see either the old content or the new."""
    path = f"{checkpoint.root}/{name}"
    try:
        checkpoint.files.create_dir(path.rpartition("/")[0], recursive=True)
        with checkpoint.files.open_output_stream(f"{path}.new") as stream:
            stream.write(json.dumps(content).encode())
        checkpoint.files.move(f"{path}.new", path)
    except Exception as error:
        raise CommitRefusedError(
            f"a limit is stored in the checkpoint, but this Python process cannot write to "
            f"{checkpoint.label!r} ({type(error).__name__}): check the address and the credentials",
            condition="COMMIT_REFUSED.CHECKPOINT_UNREACHABLE",
            checkpoint=checkpoint.label,
        ) from error
