"""The passes that a contract and the options need, and running them on a table."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pyarrow as pa

from penstock.changes.options import COMMIT, EVER, ChangeOptions
from penstock.changes.passes.carryovers import changed
from penstock.changes.passes.net import counted, filled, net
from penstock.changes.passes.rows import ChangeRows, column_at
from penstock.changes.passes.violations import check_order_known, check_sequence, check_single
from penstock.feeds.contract import IS_DELETE, IS_INSERT, IS_POSTIMAGE, IS_PREIMAGE, ChangeContract
from penstock.spark.factorize import Codes, combine_codes, factorize


@dataclass(frozen=True)
class Passes:
    """The passes to run on change rows; the rules are those of Spark 4.3, without its defects."""

    carryovers: bool = False
    updates: bool = False
    net: int | None = None
    """Net changes of the range (EVER), of commits (COMMIT), or of windows of that many microseconds."""
    compute_updates: bool = False
    ordered: bool = False
    """Whether a column orders the changes of a row inside a commit."""
    intermediate: bool = False

    def __bool__(self) -> bool:
        return self.carryovers or self.updates or self.net is not None

    @property
    def needs_content(self) -> bool:
        """Whether rows are compared by row version or by data."""
        return self.carryovers or (
            self.intermediate and not self.ordered and (self.updates or self.net is not None)
        )

    @classmethod
    def of(cls, contract: ChangeContract, options: ChangeOptions) -> Passes:
        """Select the passes that the feed needs."""
        net_changes = options.net_changes and contract.intermediate_changes
        return cls(
            carryovers=options.drop_carryovers and contract.carryover_rows,
            updates=options.compute_updates and contract.updates_as_delete_and_insert,
            net=options.net_window if net_changes else None,
            compute_updates=options.compute_updates,
            ordered=contract.sequence is not None,
            intermediate=contract.intermediate_changes,
        )

    def first(self, rows: ChangeRows) -> ChangeRows:
        """Run what can be done to any part of the rows, before the shuffle."""
        # If changes have an order, it takes all of them to decide which of several equal ones remains.
        partly = self.carryovers and not self.ordered
        return rows.filter(changed(rows, partial=True)) if partly else rows

    def whole(self, rows: ChangeRows) -> ChangeRows:
        """Run all passes on all changes of each row in a commit, or in a window for net changes."""
        if self.carryovers:
            rows = rows.filter(changed(rows))
        if rows.layout.keyless:
            # Equal ids mean equal rows: there are no updates, and no order.
            return rows if self.net is None else counted(rows, self._windows(rows))
        if self.updates and self.net is None:
            return self._with_updates(rows)
        if self.net is not None:
            self._check_order(rows)
            windows = self._windows(rows)
            return net(filled(rows, windows), windows, updates=self.compute_updates)
        if not self.intermediate:
            check_single(rows, asks_for_sequence=False)
        return rows

    def _with_updates(self, rows: ChangeRows) -> ChangeRows:
        self._check_order(rows)
        if self.ordered:
            return net(rows, rows.change, updates=True)
        deletes, inserts = rows.kinds == IS_DELETE, rows.kinds == IS_INSERT
        groups = rows.changes
        pairs = groups.holding((groups.counts(deletes) == 1) & (groups.counts(inserts) == 1))
        kinds = np.where(pairs & deletes, IS_PREIMAGE, np.where(pairs & inserts, IS_POSTIMAGE, rows.kinds))
        return rows.with_kinds(kinds.astype(np.int8))

    def _check_order(self, rows: ChangeRows) -> None:
        if self.ordered:
            check_sequence(rows)
            return
        check_single(rows, asks_for_sequence=self.intermediate)
        if self.intermediate and not self.carryovers:
            check_order_known(rows)

    def _windows(self, rows: ChangeRows) -> Codes:
        if self.net == COMMIT:
            return rows.change
        if self.net == EVER:
            return rows.row
        assert self.net is not None
        times = column_at(rows.table, (rows.layout.timestamp,)).cast(pa.int64()).to_numpy()
        return combine_codes(rows.row, factorize([pa.array(times // self.net)]))
