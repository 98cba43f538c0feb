"""Pushdown of a query's limit into its queue source: how many rows the source may still read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from penstock.commit.offsets import pad
from penstock.errors import InvalidOptionError, condition_of
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.limit_state import UnreadableState, rows_passed

log = logging.getLogger("penstock.spark")


@dataclass(frozen=True)
class Quota:
    """The limit of a query and its remaining rows when the query starts, passed to the source as options."""

    rows: int
    """How many rows the limit lets through over the whole life of the query."""
    left: int | None
    """How many more rows to read, if each passes the limit; None if the query may drop or add rows."""
    since: tuple[int, ...] | None
    """The positions from which ``left`` counts; None for the start of the query."""
    checkpoint: str = field(repr=False)
    """The location of the query's checkpoint."""

    @classmethod
    def of(cls, values: object, checkpoint: str | None) -> Quota | None:
        """Parse the options ``limitRows`` and ``limitUrl``.

        Raises InvalidOptionError.
        """
        if values is None and checkpoint is None:
            return None
        if not isinstance(values, Mapping) or checkpoint is None:
            raise InvalidOptionError(
                "limitRows and limitUrl are internal options: use stream.limit(n)", option="limitRows"
            )
        since: Sequence[int] | None = values.get("since")
        return cls(values["rows"], values.get("left"), None if since is None else tuple(since), checkpoint)

    def options(self) -> dict[str, str]:
        """Return the options for the source; Spark redacts an option with ``url`` in its name."""
        values = {"rows": self.rows, "left": self.left, "since": self.since}
        return {"limitRows": json.dumps(values), "limitUrl": self.checkpoint}


class RemainingQuota:
    """The rows that a query may still read, at the start of each micro-batch."""

    def __init__(self, quota: Quota | None, *, fail_on_data_loss: bool) -> None:
        if quota is not None and not fail_on_data_loss:
            # Trimmed rows lie between the positions but never pass the limit.
            quota = replace(quota, left=None)
        self._quota = quota
        self._since = None if quota is None else quota.since
        self._checked: tuple[int, bool] | None = None
        """The last micro-batch whose state was read, and whether the limit was reached there."""

    def left(self, start: Sequence[int]) -> int | None:
        """Return how many rows the micro-batch after ``start``, the last committed offset, may have.

        0 or less if the limit is reached, None if unlimited.
        """
        if self._quota is None:
            return None
        if self._quota.left is None:
            return 0 if self._reached(self._quota) else None
        if self._since is None:
            self._since = tuple(start)
        return self._quota.left - (sum(start) - sum(pad(self._since, len(start))))

    def _reached(self, quota: Quota) -> bool:
        """Return whether the limit is reached, according to the state of the last micro-batch."""
        checkpoint = Checkpoint(quota.checkpoint)
        last = checkpoint.last_commit()
        if last is None:
            return False
        # An idle query asks again and again.
        if self._checked is None or self._checked[0] != last:
            self._checked = last, self._is_enough(checkpoint, last, quota.rows)
        return self._checked[1]

    def _is_enough(self, checkpoint: Checkpoint, last: int, rows: int) -> bool:
        try:
            return rows_passed(checkpoint, last) >= rows
        except UnreadableState as unreadable:
            # The driver counts as well, and stops the query; a micro-batch may start before it does.
            log.debug(
                "the limit's state cannot be read here: %s",
                unreadable,
                extra={"action": "limit_unread", "batch": last, "error": condition_of(unreadable)},
            )
            return False
