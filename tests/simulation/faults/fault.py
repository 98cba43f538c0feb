"""Faults, and the baseline changes that several faults share."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """Replacement of a text in a file."""

    file: str
    text: str
    replacement: str


@dataclass(frozen=True)
class Fault:
    """Change that violates a guarantee in some schedules."""

    name: str
    """What the code does wrong."""
    file: str
    text: str
    replacement: str
    baseline: Change | None = None
    """A change that removes another check, which would otherwise mask the fault."""

    @property
    def change(self) -> Change:
        return Change(self.file, self.text, self.replacement)


NO_ROW_TIME_CHECK = Change(
    "commit/source_rows.py",
    "                _refuse(tx, offset)\n",
    "                return\n",
)
"""Do not compare the times of the last rows, which detect a queue that was restored or recreated."""

NO_INPUT_CHECK = Change(
    "commit/protocol.py",
    "        _require_same_input(batch, existing.ranges)\n        _finish_replay(tx, batch, locked)\n",
    "        _finish_replay(tx, batch, locked)\n",
)
"""Do not refuse a micro-batch that the sink has already committed with other input."""

NO_COMPARE_AND_SET = Change(
    "store/sql/common.sql",
    "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;\n",
    "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and (next_index = :old or :safe < :new);\n",
)
"""Move a consumer even if it is not at the start of the micro-batch."""
