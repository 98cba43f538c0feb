"""The limit that a query began with, kept beside its checkpoint: Spark keeps what was counted, and not of how many."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from penstock.arguments import in_quotes
from penstock.errors import CheckpointMismatch, CommitRefused
from penstock.json_text import parse_json
from penstock.spark.checkpoint import Checkpoint, redact_location

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
        where = redact_location(checkpoint.location)
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
        where = redact_location(checkpoint.location)
        raise CommitRefused(
            f"a limit is kept beside the checkpoint, and nothing can be written at {where!r} from this Python "
            f"({type(error).__name__}): check the address and the credentials",
            checkpoint=where,
        ) from error


# ---- key_record: A limit for each key, kept beside the checkpoint: Spark keeps the counts, and not of what nor of how many.

_KEY_FILE = "limit-per.json"


@dataclass(frozen=True)
class KeyRecord:
    """A limit for each key."""

    per: tuple[str, ...]
    rows: int
    forget_ms: int | None

    def __str__(self) -> str:
        forgotten = "" if self.forget_ms is None else f", forget_after='{self.forget_ms} milliseconds'"
        return f"limit({self.rows}, {_shown(self.per)}{forgotten})"


def read_key_record(checkpoint: Checkpoint) -> KeyRecord | None:
    """The limit beside a checkpoint; None where a query has run without one, or none at all."""
    return read_beside(
        checkpoint,
        _KEY_FILE,
        lambda found: KeyRecord(tuple(map(str, found["per"])), int(found["rows"]), found["forget_ms"]),
    )


def write_key_record(checkpoint: Checkpoint, record: KeyRecord, *, exact: bool) -> None:
    """Keep the limit, before a micro-batch that counts for it.

    Parameters
    ----------
    exact
        Whether two columns may differ by case alone.

    Raises
    ------
    CheckpointMismatch
        When the counts there are those of other columns, or there are none.
    CommitRefused
        When the limit was another one, and a micro-batch was begun with that and not committed; or nothing can be written.
    """
    before, begun = read_key_record(checkpoint), checkpoint.last_planned()
    if begun is not None:
        if before is None:
            raise _uncounted(checkpoint)
        if _named(before.per, exact) != _named(record.per, exact):
            raise _other_key(checkpoint, before.per, record.per)
        changed = (before.rows, before.forget_ms) != (record.rows, record.forget_ms)
        if changed and begun != checkpoint.last_commit():
            raise _other_rows(checkpoint, begun, before, record)
    if record != before:
        write_beside(checkpoint, _KEY_FILE, {"version": 1, **vars(record)})


def _uncounted(checkpoint: Checkpoint) -> CheckpointMismatch:
    where = redact_location(checkpoint.location)
    limit = read_record(checkpoint)
    how = "without a limit" if limit is None else f"with limit({limit.rows})"
    return CheckpointMismatch(
        f"the query at {where!r} has run {how} before, and no key was counted: start with a new checkpoint; a consumer's offset "
        "says where it goes on",
        condition="CHECKPOINT_MISMATCH.LIMIT_PER",
        checkpoint=where,
    )


def _other_key(checkpoint: Checkpoint, before: Sequence[str], now: Sequence[str]) -> CheckpointMismatch:
    where = redact_location(checkpoint.location)
    return CheckpointMismatch(
        f"the limit at {where!r} has counted the rows of each {_shown(before)}, and is now to count those of each {_shown(now)}: "
        "rows would be dropped by counts of other keys. Start with a new checkpoint; a consumer's offset says where it goes on",
        condition="CHECKPOINT_MISMATCH.LIMIT_PER",
        checkpoint=where,
        before=list(before),
        now=list(now),
    )


def _other_rows(checkpoint: Checkpoint, begun: int, before: KeyRecord, now: KeyRecord) -> CommitRefused:
    return CommitRefused(
        f"micro-batch {begun} was begun with {before} and not committed; with {now} it might have other rows than the sink has got: "
        f"start the query once with {before}, which finishes it, then with {now}",
        condition="COMMIT_REFUSED.LIMIT_CHANGED",
        checkpoint=redact_location(checkpoint.location),
        before=str(before),
        now=str(now),
    )


def _named(names: Sequence[str], exact: bool) -> list[str]:
    return [name if exact else name.lower() for name in names]


def _shown(names: Sequence[str]) -> str:
    return f"per=[{', '.join(map(in_quotes, names))}]"
