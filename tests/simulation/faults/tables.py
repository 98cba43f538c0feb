"""Faults in table sinks."""

from __future__ import annotations

from tests.simulation.faults.fault import Fault

TABLES = [
    Fault(
        "rows of an unacknowledged attempt are written to the table too",
        "tables/sql/staging.py",
        "        rows = [row for row in staged if row.batch_id == self.batch_id and row.attempt in attempts]\n        if sum(row.segments for row in rows) != sum(attempts.values()):\n",
        "        rows = [row for row in staged if row.batch_id == self.batch_id]\n        if sum(row.segments for row in rows) < sum(attempts.values()):\n",
    ),
    Fault(
        "missing staged rows of a table are not noticed",
        "tables/sql/staging.py",
        "        if sum(row.segments for row in rows) != sum(attempts.values()):\n            raise self.rows_lost_error()\n",
        "",
    ),
    Fault(
        "a replay writes its staged rows to the table again",
        "tables/sql/writer.py",
        "    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:\n        self.stage.drop(tx)\n",
        "    def discard(self, tx: Transaction, batch: BatchCommit[int]) -> None:\n        self.write(tx, dict(batch.attempts))\n",
    ),
    Fault(
        "a table's micro-batch is added to the ledger in a separate transaction from its rows",
        "tables/sql/writer.py",
        '            if self.guarantee == "at_least_once":\n                store.database.run(',
        '            if self.guarantee != "idempotent":\n                store.database.run(',
    ),
    Fault(
        "a table's epoch is added to the ledger in a separate transaction from its rows",
        "tables/continuous.py",
        '            self.commits.commit(TableTarget(layout, self.name, "append", stage), epoch, offset)\n',
        '            target = TableTarget(layout, self.name, "append", stage)\n            open_store(self.url).database.run(\n                lambda tx: target.write(tx, dict(epoch.attempts)), idempotent=True\n            )\n            self.commits.record(target.ledger_name, epoch, offset)\n',
    ),
    Fault(
        "a table's staged rows are deleted whenever writers are created",
        "tables/continuous.py",
        "        layout = self._checked_encoder.layout\n        open_store",
        "        self.delete_staged()\n        layout = self._checked_encoder.layout\n        open_store",
    ),
]
