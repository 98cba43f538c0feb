"""A case whose sink is a Delta table, in each output mode and with changes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from tests.support.crash.chains import at_length
from tests.support.crash.children import Fault
from tests.support.crash.queries import Row
from tests.tables.crash.cases import CHUNKS, TABLES, TableCase

if TYPE_CHECKING:
    from penstock import Pipeline, Stream


class DeltaCase(TableCase):
    """Its name is its table's too, in a folder beside the store."""

    @property
    def table(self) -> Path:
        return Path(self.folder, "delta", self.name)

    def write(self, stream: Stream) -> Pipeline:
        import penstock

        kind = TABLES[self.kind]
        sink = penstock.TableSink(
            self.name,
            () if kind.mode == "append" and not kind.changes else kind.keys,
            f"delta://{self.table.parent}",
            apply_changes=kind.changes,
            scd_type=kind.scd_type,
        )
        return stream.write(sink, guarantee=self.guarantee, output_mode=kind.mode)

    def rows(self) -> Counter[Row]:
        from deltalake import DeltaTable

        if not DeltaTable.is_deltatable(str(self.table)):
            return Counter()
        found = DeltaTable(str(self.table)).to_pyarrow_table().to_pylist()
        return Counter(tuple(row.values()) for row in found)

    @property
    def staged(self) -> list[Path]:
        return list(self.table.glob("_penstock/*.parquet"))


def every_state(case: DeltaCase) -> Sequence[Fault]:
    """Every state of each micro-batch. Changes have one more, between what is remembered and the table, and
    updates with rows another one, between the files that are rewritten and the table.
    """
    plan, table = [], TABLES[case.kind]
    for fault in at_length(case):
        if fault.state == "COMMITTED" and table.changes:
            plan.append(Fault("REMEMBERED", fault.batch))
        if fault.state == "COMMITTED" and table.mode == "update" and fault.batch < CHUNKS:
            plan.append(Fault("REWRITTEN", fault.batch))
        plan.append(fault)
    return plan
