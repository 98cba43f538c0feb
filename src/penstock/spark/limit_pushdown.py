"""What a query's limit leaves to read of a queue, as the query tells its source."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from penstock.commit.offsets import pad
from penstock.errors import InvalidOption, condition_of
from penstock.spark.checkpoint import Checkpoint
from penstock.spark.internals.limit_state import UnreadableState, rows_passed


@dataclass(frozen=True)
class Quota:
    """Told when the query starts; how far it has come since, the positions say, or the state in the checkpoint.

    Parameters
    ----------
    rows
        How many rows the limit lets through over the whole life of the query.
    left
        How many more there are to read, where each row that is read is one that passes; None where rows may be dropped or made on the
        way.
    since
        The positions from which ``left`` counts; None where that is where the query begins.
    checkpoint
        Its location.
    """

    rows: int
    left: int | None
    since: tuple[int, ...] | None
    checkpoint: str = field(repr=False)

    @classmethod
    def of(cls, given: Any, checkpoint: str | None) -> Quota | None:
        """From the options ``limitRows`` and ``limitUrl``.

        Raises
        ------
        InvalidOption
        """
        if given is None and checkpoint is None:
            return None
        if not isinstance(given, Mapping) or checkpoint is None:
            raise InvalidOption(
                "limitRows and limitUrl are set by stream.limit(n): use that", option="limitRows"
            )
        since: Sequence[int] | None = given.get("since")
        return cls(given["rows"], given.get("left"), None if since is None else tuple(since), checkpoint)

    def options(self) -> dict[str, str]:
        """The options that tell it; Spark hides one with ``url`` in its name."""
        given = {"rows": self.rows, "left": self.left, "since": self.since}
        return {"limitRows": json.dumps(given), "limitUrl": self.checkpoint}


# ---- limit_pushdown: How much of a queue a query with a limit may still read.

log = logging.getLogger("penstock.spark")


class RemainingQuota:
    """What is left, at the start of each micro-batch; all that there is, for a query without a limit."""

    def __init__(self, quota: Quota | None, *, fail_on_data_loss: bool) -> None:
        if quota is not None and not fail_on_data_loss:
            # Trimmed rows lie between the positions but never pass the limit.
            quota = replace(quota, left=None)
        self._quota = quota
        self._since = None if quota is None else quota.since
        self._looked: tuple[int, bool] | None = None

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
