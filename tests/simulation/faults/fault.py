"""What a fault is, and the checks that several faults leave out."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Change:
    """A text of a file, and what stands in its place."""

    file: str
    text: str
    instead: str


@dataclass(frozen=True)
class Fault:
    """One change that breaks something."""

    name: str
    file: str
    text: str
    instead: str
    without: Change | None = None
    """How the check is left out that would find what this breaks."""

    @property
    def change(self) -> Change:
        return Change(self.file, self.text, self.instead)


TIMES_OF_ROWS = Change(
    "commit/source_rows.py",
    "                _refuse(tx, offset)\n",
    "                return\n",
)
"""The times of a queue's last rows tell it from one that was restored, or recreated, and has grown again."""

SAME_INPUT = Change(
    "commit/protocol.py",
    "        _require_same_input(batch, existing.ranges)\n        _finish_replay(tx, batch, locked)\n",
    "        _finish_replay(tx, batch, locked)\n",
)
"""A micro-batch that the sink has already committed with other input is refused."""

COMPARE_AND_SET = Change(
    "store/sql/common.sql",
    "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and next_index = :old;\n",
    "where consumer_id = :consumer_id and queue_id = :queue_id and partition = :partition and (next_index = :old or :safe < :new);\n",
)
"""A consumer moves only from where the micro-batch begins."""
