"""The committed epochs of a continuous query, over all its runs."""

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
Logged = tuple[int, JsonValue]
"""An epoch in the checkpoint, and its offset."""


class CommittedEpochs:
    """The epochs that a query has committed; ``limited`` if their rows count towards a limit.

    The durable steps that commit an epoch:

        source's plan -> sink's transaction -> offsets/e -> commits/e -> the source is notified

    The sink comes before the checkpoint: if a driver dies in between, the next one finds in the sink what the
    checkpoint lacks. If the sink's transaction alone prevents lost and repeated epochs, a separate thread
    writes the checkpoint later and skips epochs; the source is notified of the epochs that are logged.
    """

    def __init__(
        self,
        source: SourceDriver,
        sink: SinkDriver,
        logs: CheckpointLog,
        clock: Clock,
        *,
        limited: bool,
        retain: int,
    ) -> None:
        self._source, self._sink, self._logs = source, sink, logs
        self._clock, self._limited, self._retain = clock, limited, retain
        # Otherwise only the checkpoint shows whether another driver took over or what a limit let through.
        may_lag = sink.keeps_offsets and source.advanced_by_sink and not limited
        self._follower = CheckpointFollower(logs, retain) if may_lag else None
        self.last = -1
        """The last epoch that the sink has."""
        self.positions: Positions = {}
        self.rows = 0
        """The rows of committed epochs, which count towards the limit."""
        self._logged: Logged | None = None
        """The last epoch in the checkpoint, and its offset."""
        self._begun: dict[int, bytes] = {}
        """The entries of epochs that earlier runs have begun and not committed, by number."""
        self._notified_at = clock()
        self._told = -1
        """The last epoch that the source was notified of."""

    def settle(self, *, first_run: bool) -> None:
        """Find out where the last run ended: the sink has all of its last epoch, or nothing of it."""
        if self._follower is not None:
            self._follower.flush()
        if not first_run:
            self._require_own_checkpoint()
        last = recover(self._logs, self._sink, self._source.follow, limited=self._limited)
        self.last = -1 if last is None else last
        if self._limited:
            self.rows = self._logs.passed(last)
        self._begun = self._logs.begun()
        begun = partial(self._logs.only_offset, 0) if 0 in self._begun else None
        offset = None if last is None else self._logs.only_offset(last)
        self.positions = self._source.start(offset, begun)
        if last is not None:
            self._logged, self._told = (last, offset), last
            self._source.logged(offset)

    def _require_own_checkpoint(self) -> None:
        """Refuse to repeat a run after another driver has committed; perhaps only the checkpoint shows it."""
        last = self._logs.last_commit()
        if last is not None and last > self.last:
            raise OwnerFencedError(
                f"the checkpoint at {self._logs.shown!r} has epochs up to {last}, and this driver has "
                f"committed {self.last}: another driver runs the query. Run each query once",
                condition="OWNER_FENCED.CHECKPOINT",
                checkpoint=self._logs.shown,
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
        passed, begun = self.rows if self._limited else None, self._begun.get(number)
        self._logs.write_offset(number, offset, passed, instead=begun)
        self._logs.write_commit(number)
        self._logged = number, offset
        self._logs.prune(number, self._retain)

    def _newest_logged(self) -> Logged | None:
        """Return the last epoch in the checkpoint, and its offset."""
        if self._follower is not None:
            self._logged = _later(self._logged, self._follower.newest())
        return self._logged

    @property
    def lags(self) -> bool:
        """Whether the checkpoint lacks epochs that are committed; for any thread."""
        followed = None if self._follower is None else self._follower.logged
        logged = _later(self._logged, followed)
        return self.last > (-1 if logged is None else logged[0])

    @property
    def untold(self) -> bool:
        """Whether the checkpoint has epochs that the source has not been notified of."""
        logged = self._newest_logged()
        return logged is not None and logged[0] > self._told

    def notify_source(self) -> bool:
        """Notify the source of the last epoch that is logged; return whether it asks the query to end."""
        self._notified_at, logged = self._clock(), self._newest_logged()
        if logged is None:
            self._source.require_at(self.positions)
            return False
        self._told = logged[0]
        return self._source.logged(logged[1])

    @property
    def silent_seconds(self) -> float:
        """Seconds since the source was last notified."""
        return self._clock() - self._notified_at

    def log_all(self) -> None:
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


def _later(one: Logged | None, other: Logged | None) -> Logged | None:
    """Return the later of two epochs; the checkpoint may have one that this driver did not log."""
    known = [each for each in (one, other) if each is not None]
    return max(known, key=itemgetter(0), default=None)
