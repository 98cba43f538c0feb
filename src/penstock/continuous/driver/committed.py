"""The committed epochs of a continuous query, and the durable steps that commit one.

::

    source's plan -> sink's transaction -> offsets/e -> commits/e -> the source is notified

The sink comes before the checkpoint: after a driver dies in between, the next one finds there what the
checkpoint lacks.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.continuous.connectors.protocol import Positions, SinkDriver, SourceDriver, WriterFactory
from penstock.continuous.driver.checkpoint_log import CheckpointLog, recover
from penstock.continuous.driver.epochs import Epoch
from penstock.errors import OwnerFencedError
from penstock.json_text import JsonValue


class CommittedEpochs:
    """How far a query has come, over all its runs; ``limited`` if its rows count towards a limit."""

    def __init__(
        self,
        source: SourceDriver,
        sink: SinkDriver,
        logs: CheckpointLog,
        clock: Callable[[], float],
        *,
        limited: bool,
    ) -> None:
        self._source, self._sink, self._logs = source, sink, logs
        self._clock, self._limited = clock, limited
        self.last = -1
        """The last committed epoch."""
        self.positions: Positions = {}
        self.rows = 0
        """The rows of committed epochs, which count towards the limit."""
        self._offset: JsonValue = None
        self._logging = -1
        """The last epoch that this driver has committed to the sink and is logging."""
        self._notified_at = clock()

    def settle(self, *, first_run: bool) -> None:
        """Find out where the last run has ended: the sink has its last epoch as a whole, or not at all."""
        if not first_run:
            self._require_own_checkpoint()
        last = recover(self._logs, self._sink, self._source.follow, limited=self._limited)
        self._offset = None if last is None else self._logs.offset(last)
        self.last = -1 if last is None else last
        if self._limited:
            self.rows = self._logs.passed(last)
        self.positions = self._source.start(self._offset)
        if self._offset is not None:
            self._source.logged(self._offset)

    def _require_own_checkpoint(self) -> None:
        """Refuse to repeat a run after another driver has committed; only the checkpoint may show that."""
        last = self._logs.last_committed()
        if last not in (None, self.last, self._logging):
            raise OwnerFencedError(
                f"the checkpoint at {self._logs.location!r} has epochs up to {last}, and this driver has "
                f"committed {self.last}: another driver runs the query. Run each query once",
                condition="OWNER_FENCED.CHECKPOINT",
                checkpoint=self._logs.location,
            )

    def commit(self, writers: WriterFactory, epoch: Epoch) -> JsonValue:
        """Commit an epoch; return its offset, of which the source is not notified yet."""
        end = {**self.positions, **epoch.offsets}
        offset = self._source.plan(self.positions, end, epoch.last_times)
        rows = self.rows + epoch.rows_out
        self._sink.commit(writers, epoch, offset)
        self._logging = epoch.number
        self._logs.write_offset(epoch.number, offset, rows if self._limited else None)
        self._logs.write_commit(epoch.number)
        self.last, self.positions, self.rows, self._offset = epoch.number, end, rows, offset
        return offset

    def notify_source(self) -> bool:
        """Notify the source of the last offset; return whether it asks the query to end."""
        self._notified_at = self._clock()
        if self._offset is None:
            self._source.require_at(self.positions)
            return False
        return self._source.logged(self._offset)

    @property
    def idle_seconds(self) -> float:
        """The time since the source was last notified."""
        return self._clock() - self._notified_at

    def release(self) -> None:
        """Give up ownership of the source."""
        self._source.release(self._offset)
