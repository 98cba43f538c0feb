"""What a query's limit leaves to read of a queue, as the query tells its source."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.errors import InvalidOption


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
