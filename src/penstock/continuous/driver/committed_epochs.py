"""The committed epochs of a continuous query, across all its runs."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import itemgetter

from penstock.continuous.connectors.protocol import Epoch, Positions, SinkDriver, SourceDriver, WriterFactory
from penstock.continuous.driver.checkpoint_follower import CheckpointFollower
from penstock.continuous.driver.checkpoint_log import CheckpointLog, recover
from penstock.errors import OwnerFencedError
from penstock.json_text import JsonValue

Clock = Callable[[], float]
LoggedEpoch = tuple[int, JsonValue]
"""An epoch in the checkpoint, and its offset."""


class CommittedEpochs:
    """The epochs that a query has committed; with ``limited``, their rows count towards a limit.

    The durable steps that commit an epoch:

        source's plan -> sink's transaction -> offsets/e -> commits/e -> the source is notified

    The sink comes before the checkpoint. If a driver dies in between, the next driver finds in the sink what
    the checkpoint lacks. If the sink's transaction alone prevents lost and repeated epochs, a separate thread
    writes the checkpoint later and skips epochs; the source is only notified of logged epochs.
    """

    def __init__(
        self,
        source: SourceDriver,
        sink: SinkDriver,
        checkpoint: CheckpointLog,
        clock: Clock,
        *,
        limited: bool,
        retain: int,
    ) -> None:
        self._source, self._sink, self._checkpoint = source, sink, checkpoint
        self._clock, self._limited, self._retain = clock, limited, retain
        # Otherwise only the checkpoint shows whether another driver has taken over, or what a limit let
        # through.
        may_lag = sink.records_offsets and source.advanced_by_sink and not limited
        self._follower = CheckpointFollower(checkpoint, retain) if may_lag else None
        self.last = -1
        """The number of the last epoch in the sink; -1 if there is none."""
        self.positions: Positions = {}
        self.rows = 0
        """The number of rows in committed epochs, which count towards the limit."""
        self._logged: LoggedEpoch | None = None
        """The last epoch in the checkpoint."""
        self._begun: dict[int, bytes] = {}
        """The offset entries, by number, of epochs that earlier runs have begun and not committed."""
        self._notified_at = clock()
        self._notified_epoch = -1
        """The last epoch that the source was notified of."""

    def resume(self, *, first_run: bool) -> None:
        """Find out where the last run ended. The sink has either all or none of its last epoch."""
        if self._follower is not None:
            self._follower.flush()
        if not first_run:
            self._require_own_checkpoint()
        last = recover(self._checkpoint, self._sink, self._source.move_past_commit, limited=self._limited)
        self.last = -1 if last is None else last
        if self._limited:
            self.rows = self._checkpoint.rows_passed(last)
        self._begun = self._checkpoint.begun_entries()
        read_begun = partial(self._checkpoint.single_offset, 0) if 0 in self._begun else None
        offset = None if last is None else self._checkpoint.single_offset(last)
        self.positions = self._source.start(offset, read_begun)
        if last is not None:
            self._logged, self._notified_epoch = (last, offset), last
            self._source.notify_logged(offset)

    def _require_own_checkpoint(self) -> None:
        """Refuse to repeat a run after another driver has committed, which the checkpoint shows."""
        last = self._checkpoint.last_commit()
        if last is not None and last > self.last:
            raise OwnerFencedError(
                f"the checkpoint at {self._checkpoint.label!r} has epochs up to {last}, but this driver has "
                f"only committed {self.last}: another driver runs the query. Run each query once",
                condition="OWNER_FENCED.CHECKPOINT",
                checkpoint=self._checkpoint.label,
            )

    def commit(self, writers: WriterFactory, epoch: Epoch) -> JsonValue:
        """Commit an epoch; return its offset."""
        end = {**self.positions, **epoch.offsets}
        offset = self._source.plan(self.positions, end, epoch.last_times)
        self._sink.commit(writers, epoch, offset)
        self.last, self.positions, self.rows = epoch.number, end, self.rows + epoch.rows_out
        if self._follower is None:
            self._log(epoch.number, offset)
        else:
            self._follower.add(epoch.number, offset)
        return offset

    def _log(self, number: int, offset: JsonValue) -> None:
        rows_passed, begun_entry = self.rows if self._limited else None, self._begun.get(number)
        self._checkpoint.write_offset(number, offset, rows_passed, replaced_entry=begun_entry)
        self._checkpoint.write_commit(number)
        self._logged = number, offset
        self._checkpoint.prune(number, self._retain)

    def _newest_logged(self) -> LoggedEpoch | None:
        """Return the last epoch in the checkpoint."""
        if self._follower is not None:
            self._logged = _later(self._logged, self._follower.newest())
        return self._logged

    @property
    def checkpoint_lags(self) -> bool:
        """Whether the checkpoint lacks committed epochs; for any thread."""
        follower_logged = None if self._follower is None else self._follower.logged
        logged = _later(self._logged, follower_logged)
        return self.last > (-1 if logged is None else logged[0])

    @property
    def has_unnotified_epochs(self) -> bool:
        """Whether the checkpoint has epochs that the source has not been notified of."""
        logged = self._newest_logged()
        return logged is not None and logged[0] > self._notified_epoch

    def notify_source(self) -> bool:
        """Notify the source of the last logged epoch; return whether it asks the query to end."""
        self._notified_at, logged = self._clock(), self._newest_logged()
        if logged is None:
            self._source.require_not_restored(self.positions)
            return False
        self._notified_epoch = logged[0]
        return self._source.notify_logged(logged[1])

    @property
    def seconds_since_notified(self) -> float:
        """Seconds since the source was last notified."""
        return self._clock() - self._notified_at

    def flush_checkpoint(self) -> None:
        """Wait until the checkpoint has all epochs."""
        if self._follower is not None:
            self._follower.flush()

    def release(self) -> None:
        """Give up the source, at the last epoch in the checkpoint."""
        try:
            if self._follower is not None:
                self._follower.end()
        finally:
            logged = self._newest_logged()
            self._source.release(None if logged is None else logged[1])


def _later(first: LoggedEpoch | None, second: LoggedEpoch | None) -> LoggedEpoch | None:
    """Return the later of two epochs, either of which may be None."""
    existing = [epoch for epoch in (first, second) if epoch is not None]
    return max(existing, key=itemgetter(0), default=None)
