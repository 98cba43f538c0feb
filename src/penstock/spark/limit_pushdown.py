"""How much of a queue a query with a limit may still read."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace

from penstock.commit.offsets import pad
from penstock.errors import condition_of
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.limit_state import UnreadableState, rows_passed
from penstock.spark.options import SourceOptions
from penstock.spark.quota import Quota

log = logging.getLogger("penstock.spark")


class Allowance:
    """What is left, at the start of each micro-batch; all that there is, for a query without a limit."""

    def __init__(self, quota: Quota | None) -> None:
        self._quota = quota
        self._since = None if quota is None else quota.since
        self._looked: tuple[int, bool] | None = None

    @classmethod
    def of(cls, options: SourceOptions) -> Allowance:
        quota = options.quota
        if quota is not None and not options.fail_on_data_loss:
            # Rows that were trimmed are between the positions, and have not passed.
            quota = replace(quota, left=None)
        return cls(quota)

    def left(self, start: Sequence[int]) -> int | None:
        """How many rows the next micro-batch may have; 0 or less when it is enough, None for no bound.

        Parameters
        ----------
        start
            Where the last micro-batch ended, which Spark has committed.
        """
        if self._quota is None:
            return None
        if self._quota.left is None:
            return 0 if self._reached(self._quota) else None
        if self._since is None:
            self._since = tuple(start)
        return self._quota.left - (sum(start) - sum(pad(self._since, len(start))))

    def _reached(self, quota: Quota) -> bool:
        """Whether the limit has let all its rows through, by the state of the last micro-batch."""
        checkpoint = Checkpoint(quota.checkpoint)
        last = checkpoint.last_commit()
        if last is None:
            return False
        # While a query rests it is asked again and again.
        if self._looked is None or self._looked[0] != last:
            self._looked = last, self._is_enough(checkpoint, last, quota.rows)
        return self._looked[1]

    def _is_enough(self, checkpoint: Checkpoint, last: int, rows: int) -> bool:
        try:
            return rows_passed(checkpoint, last) >= rows
        except UnreadableState as unreadable:
            # The driver counts as well, and asks for no more; a micro-batch may begin before it does.
            log.debug(
                "the limit's state cannot be read here: %s",
                unreadable,
                extra={"action": "limit_unread", "batch": last, "error": condition_of(unreadable)},
            )
            return False


def at_most(options: SourceOptions, rows: int | None) -> SourceOptions:
    """The options with no more rows for a micro-batch."""
    if rows is None:
        return options
    given = options.max_rows_per_trigger
    return replace(options, max_rows_per_trigger=rows if given is None else min(given, rows))
