"""The contract of a change feed, and the schema of dead letters."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import pyarrow as pa

from penstock.arguments import column_names, in_quotes, require
from penstock.errors import InvalidChangelogSchemaError

CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP = "_change_type", "_commit_version", "_commit_timestamp"
CHANGE_COLUMNS = (CHANGE_TYPE, COMMIT_VERSION, COMMIT_TIMESTAMP)
INSERT, DELETE, PREIMAGE, POSTIMAGE = "insert", "delete", "update_preimage", "update_postimage"
TYPES = (INSERT, DELETE, POSTIMAGE, PREIMAGE)
IS_INSERT, IS_DELETE, IS_POSTIMAGE, IS_PREIMAGE = range(4)
"""Change types as numbers: their indexes in TYPES."""
REASON, VALUE = "reason", "value"
COORDINATES = ("topic", "partition", "offset")
DEAD_LETTERS = pa.schema(
    [
        pa.field(REASON, pa.string(), nullable=False),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field(VALUE, pa.string()),
    ]
)
"""The schema of a dead letter queue: the reason, the position of the event in its topic, and the event."""


@dataclass(frozen=True)
class ChangeContract:
    """Properties that a change feed guarantees for its rows, in the terms of Spark 4.2's ``Changelog``.

    Parameters
    ----------
    row_id
        The columns that identify rows of the table, nested ones as ``a.b``; never NULL unless
        ``nullable_row_id`` is set.
    row_version
        The column that identifies the version of a row, such as the commit that last wrote it: equal for the
        two rows of a carry-over pair, different before and after an update, never NULL. Without one, all data
        columns are compared.
    carryover_rows
        Whether the feed may have unchanged rows as a delete and an insert (carry-over rows), as copy-on-write
        tables do.
    intermediate_changes
        Whether a row may have several changes, which net changes combine into one.
    updates_as_delete_and_insert
        Whether an update is a delete and an insert, rather than a pre-image and a post-image.
    whole_commits
        Whether all rows of a commit are in one micro-batch. None means unknown, which a stream refuses.
    sequence
        The column that orders the changes of one row inside a commit, for feeds in which a commit may change
        a row more than once.
    nullable_row_id
        Whether the row id may contain NULL, for tables without a key, whose rows are identified by all
        columns. Such a table may have duplicate rows, so there are no updates, and net changes count rows.
    unchanged
        The column that lists the columns of the row, or of its structs, with unchanged TOAST values: values
        that the change did not modify and does not contain. Net changes take them from earlier changes of the
        row.
    repeated_changes
        Whether the feed may deliver a change again, equal except for its commit time; the passes process it
        once. Version and ``sequence`` have to identify each change of a row. Changes of one version may have
        different commit times.

    Raises
    ------
    InvalidChangelogSchemaError
        When the row id is missing or names a column twice, or ``repeated_changes`` is set without a
        ``sequence``.
    InvalidInputError
        When an argument has the wrong type.
    """

    row_id: Sequence[str] | str
    row_version: str | None = None
    carryover_rows: bool = False
    intermediate_changes: bool = False
    updates_as_delete_and_insert: bool = False
    whole_commits: bool | None = None
    sequence: str | None = None
    nullable_row_id: bool = False
    unchanged: str | None = None
    repeated_changes: bool = False

    def __post_init__(self) -> None:
        for flag in (
            "carryover_rows", "intermediate_changes", "updates_as_delete_and_insert", "nullable_row_id",
            "repeated_changes",
        ):  # fmt: skip
            require(flag, getattr(self, flag), bool, "True or False")
        require("whole_commits", self.whole_commits, bool | None, "True, False or None")
        for name in ("row_version", "sequence", "unchanged"):
            require(name, getattr(self, name), str | None, "a column's name, or None")
        columns = column_names("row_id", self.row_id or ())
        if not columns or not all(columns):
            raise InvalidChangelogSchemaError(
                f"a contract needs the columns that identify rows (row_id), not {in_quotes(self.row_id)}",
                condition="INVALID_CHANGELOG_SCHEMA.MISSING_ROW_ID",
            )
        duplicate = next((column for column, count in Counter(columns).items() if count > 1), None)
        if duplicate is not None:
            raise InvalidChangelogSchemaError(
                f"row_id names the column {in_quotes(duplicate)} twice: name it once", column=duplicate
            )
        if self.repeated_changes and self.sequence is None:
            raise InvalidChangelogSchemaError(
                "repeated_changes needs a column that orders the changes of one row inside a commit, to "
                "identify a repeated change: set the contract's sequence to this column",
                condition="INVALID_CHANGELOG_SCHEMA.REPEATED_WITHOUT_SEQUENCE",
            )
        convert_fields(self, row_id=columns)


def invalid_schema(condition: str, column: str | None, message: str) -> InvalidChangelogSchemaError:
    """Return the error for a column that does not match a feed or its contract."""
    return InvalidChangelogSchemaError(
        message, condition=f"INVALID_CHANGELOG_SCHEMA.{condition}", column=column
    )


def convert_fields(instance: object, **values: object) -> None:
    """Replace fields of a frozen dataclass with their converted values, in its ``__post_init__``."""
    for name, value in values.items():
        object.__setattr__(instance, name, value)
