"""Checks of change rows for violations of the contract, and their errors."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.changes.passes.rows import ChangeRows, Groups, Numbers, Path, column_at
from penstock.errors import ChangelogContractViolationError
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    IS_DELETE,
    IS_INSERT,
    IS_POSTIMAGE,
    IS_PREIMAGE,
    TYPES,
)
from penstock.spark.factorize import combine_codes, factorize


def check_rows(rows: ChangeRows, *, needs_content: bool) -> None:
    """Refuse rows that the passes cannot process correctly."""
    layout = rows.layout
    _check_timestamps(rows)
    if (rows.kinds < 0).any():
        place = int(np.argmax(rows.kinds < 0))
        raise _violation(
            "UNEXPECTED_CHANGE_TYPE",
            rows,
            place,
            f"{CHANGE_TYPE} is {column_at(rows.table, (layout.change_type,))[place].as_py()!r}, but has to "
            f"be one of {', '.join(TYPES)}: map or filter other types first",
        )
    _check_nulls(rows, (layout.version,), "NULL_COMMIT_VERSION", "set the commit version of every change")
    for path in () if layout.nullable_row_id else layout.row_id:
        _check_nulls(rows, path, "NULL_ROW_ID", "set the row id of every row")
    if layout.sequence is not None:
        _check_nulls(rows, layout.sequence, "NULL_SEQUENCE", "set it in every change, because it orders them")
    if needs_content and layout.row_version is not None:
        advice = "leave row_version out of the contract if the feed does not set it in every row"
        _check_nulls(rows, layout.row_version, "NULL_ROW_VERSION", advice)


def _check_timestamps(rows: ChangeRows) -> None:
    field = rows.table.schema.field(rows.layout.timestamp)
    column = column_at(rows.table, (rows.layout.timestamp,))
    if not field.nullable:
        # Spark reads a NULL in a column that is declared NOT NULL as zero.
        column = pc.if_else(pc.equal(column.cast(pa.int64()), 0), None, column)
    if column.null_count:
        place = pc.index(column.is_null(), True).as_py()
        raise _violation(
            "NULL_COMMIT_TIMESTAMP", rows, place, f"{COMMIT_TIMESTAMP} is NULL: set the time of every commit"
        )


def _check_nulls(rows: ChangeRows, path: Path, condition: str, advice: str) -> None:
    column = column_at(rows.table, path)
    if column.null_count:
        place = pc.index(column.is_null(), True).as_py()
        raise _violation(condition, rows, place, f"{name_of(rows.table.schema, path)} is NULL: {advice}")


def check_sequence(rows: ChangeRows) -> None:
    """Refuse changes of one row in one commit with the same sequence, except the two rows of an update."""
    assert rows.layout.sequence is not None
    groups = Groups.by(combine_codes(rows.change, factorize(rows.columns([rows.layout.sequence]))))
    place = _first_duplicate(rows, groups)
    if place is not None:
        raise _violation(
            "UNEXPECTED_MULTIPLE_CHANGES_PER_ROW_VERSION",
            rows,
            place,
            "one commit has several changes of this row with the same "
            f"{name_of(rows.table.schema, rows.layout.sequence)}, so their order is unknown: set the "
            "contract's sequence to a column that orders them, or drop repeated changes if the feed "
            "delivers some twice",
        )


def check_repeated(rows: ChangeRows, places: Numbers, originals: Numbers) -> None:
    """Refuse repeated changes that differ from the original at the same version and sequence."""
    columns = [pa.array(rows.kinds), *rows.columns(rows.layout.data)]
    chosen = pa.array(np.concatenate([places, originals]))
    content = factorize([column.take(chosen) for column in columns]).values
    same = content[: len(places)] == content[len(places) :]
    if not same.all():
        raise _violation(
            "REPEATED_CHANGE_DIFFERS",
            rows,
            int(places[np.argmin(same)]),
            "the feed has two different changes of this row with the same version and sequence, so the "
            "second is not a repeated delivery: read the changes with deduplication_mode='none' to compare "
            "them, and use a separate feed for each server or table",
        )


def check_single(rows: ChangeRows, *, asks_for_sequence: bool) -> None:
    """Refuse several changes of one row in one commit, whose order is unknown."""
    groups = rows.changes
    advice = (
        "set the contract's sequence to the column that orders its changes"
        if asks_for_sequence
        else "set intermediate_changes=True in the contract, and its sequence to the column that orders the "
        "changes"
    )
    place = _first_duplicate(rows, groups)
    if place is not None:
        names = [TYPES[kind] for kind in rows.kinds[groups.of == groups.of[place]]]
        raise _violation(
            "UNEXPECTED_MULTIPLE_CHANGES_PER_ROW_VERSION",
            rows,
            place,
            f"one commit has {', '.join(sorted(names))} of this row: choose a row_id that is unique in the "
            f"table, or, if a commit may change a row several times, {advice}",
        )


def _first_duplicate(rows: ChangeRows, groups: Groups) -> int | None:
    """Return a row that repeats the change of another row of its group."""
    for kinds in ((IS_DELETE, IS_PREIMAGE), (IS_INSERT, IS_POSTIMAGE)):
        mask = np.isin(rows.kinds, kinds)
        several = groups.counts(mask) > 1
        if several.any():
            return int(np.argmax(groups.per_row(several) & mask))
    return None


def check_same_data(rows: ChangeRows, places: Numbers) -> None:
    """Refuse rows with the same row version and different data, which cannot be paired reliably."""
    if rows.layout.content == rows.layout.data:
        return
    of = rows.content.values[places]
    data = (
        factorize([column.take(pa.array(places)) for column in rows.columns(rows.layout.data)]).dense().values
    )
    order = np.lexsort([data, of])
    differs = (of[order][1:] == of[order][:-1]) & (data[order][1:] != data[order][:-1])
    if differs.any():
        raise _violation(
            "UNEXPECTED_MULTIPLE_CHANGES_PER_ROW_VERSION",
            rows,
            int(places[order[int(np.argmax(differs))]]),
            "one commit has several changes of this row with the same row version and different data: set "
            "the contract's sequence to the column that orders them",
        )


def check_order_known(rows: ChangeRows) -> None:
    """Refuse an insert and a delete of the same content in one commit, whose order is unknown."""
    deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
    groups = Groups.by(rows.content)
    is_unclear = (groups.counts(deletes) > 0) & (groups.counts(inserts) > 0)
    if is_unclear.any():
        raise _violation(
            "UNEXPECTED_MULTIPLE_CHANGES_PER_ROW_VERSION",
            rows,
            int(np.argmax(groups.per_row(is_unclear))),
            "one commit inserts this row and deletes it with the same content, in unknown order: set the "
            "contract's sequence to the column that orders them, or set carryover_rows=True if commits "
            "rewrite unchanged rows",
        )


def unknown_value(rows: ChangeRows, place: int, column: str) -> ChangelogContractViolationError:
    """Return the error for a row whose value is missing here and in all earlier changes."""
    return _violation(
        "UNKNOWN_VALUE",
        rows,
        place,
        f"the row has no value of {column!r}, because PostgreSQL does not send unchanged TOAST values, even "
        "if the key has changed: run ALTER TABLE … REPLICA IDENTITY FULL to log all values of later "
        "changes, or read single changes with deduplication_mode='none'",
    )


def _violation(condition: str, rows: ChangeRows, place: int, message: str) -> ChangelogContractViolationError:
    layout = rows.layout
    schema = rows.table.schema
    paths = [*layout.row_id, (layout.version,), (layout.timestamp,)]
    values = {name_of(schema, path): column_at(rows.table, path)[place].as_py() for path in paths}
    shown = ", ".join(f"{name}={value!s}" for name, value in values.items())
    return ChangelogContractViolationError(
        f"{message} (in the change with {shown})",
        condition=f"CHANGELOG_CONTRACT_VIOLATION.{condition}",
        row={name: str(value) for name, value in values.items()},
    )


def name_of(schema: pa.Schema, path: Path) -> str:
    """Return the dotted name of a nested column."""
    field: pa.Field = schema.field(path[0])
    names = [field.name]
    for place in path[1:]:
        field = field.type.field(place)
        names.append(field.name)
    return ".".join(names)
