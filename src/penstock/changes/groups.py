"""Which of the rows in a table belong together, and what each group of them holds."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.spark.factorize import Codes, ranks


class Groups:
    """Rows in groups: ``of`` holds the number of each row's group, 0, 1, 2, …"""

    def __init__(self, codes: Codes) -> None:
        dense = codes.dense()
        self.of, self.count = dense.values, dense.size

    def places(self, rows: Any) -> Any:
        """For each group the place of a row that a mask chooses; of no use where the group has none of them, or several."""
        found = np.zeros(self.count, np.int64)
        chosen = np.flatnonzero(rows)
        found[self.of[chosen]] = chosen
        return found

    def filter(self, keep: Any) -> Groups:
        """The groups of the rows that a mask chooses, with the same numbers; some may be empty."""
        kept = Groups.__new__(Groups)
        kept.of, kept.count = self.of[keep], self.count
        return kept

    def counts(self, rows: Any) -> Any:
        """How many of the rows that a mask chooses are in each group."""
        return np.bincount(self.of[rows], minlength=self.count)

    def holding(self, groups: Any) -> Any:
        """The mask of the rows in those groups that a mask chooses."""
        return groups[self.of]

    def ranks(self, rows: Any) -> Any:
        """For each of the rows (indexes, in order) how many of them before it are in the same group."""
        return ranks(self.of[rows])
