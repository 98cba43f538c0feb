"""A running continuous query, with the names of PySpark's ``StreamingQuery``."""

from __future__ import annotations

import shutil
from typing import Any

from penstock.continuous.ends import SourceDriver
from penstock.continuous.execution import ContinuousExecution, State
from penstock.pipeline.failures import plain

STOP_SECONDS = 60.0


class ContinuousQuery:
    """A query of a pipeline that runs with the continuous trigger."""

    def __init__(
        self, execution: ContinuousExecution, source: SourceDriver, temporary: str | None = None
    ) -> None:
        self._execution, self._source, self._temporary = execution, source, temporary

    def __repr__(self) -> str:
        return f"ContinuousQuery(name={self.name!r}, id={self.id!r}, state={self.state!r})"

    @property
    def id(self) -> str:
        """The query's id, the same over all runs of a checkpoint."""
        return self._execution.id

    @property
    def runId(self) -> str:
        """The id of this run."""
        return self._execution.run_id

    @property
    def name(self) -> str | None:
        """The query's name."""
        return self._execution.name

    @property
    def state(self) -> str:
        """INITIALIZING, ACTIVE, RECONFIGURING or TERMINATED."""
        return self._execution.state.value

    @property
    def isActive(self) -> bool:
        """Whether the query runs."""
        return self._execution.state is not State.TERMINATED

    @property
    def status(self) -> dict[str, Any]:
        """What the query is doing."""
        active = self._execution.state is State.ACTIVE
        return {"message": self.state, "isDataAvailable": active, "isTriggerActive": active}

    @property
    def lastProgress(self) -> dict[str, Any] | None:
        """The progress of the last epoch."""
        return self._execution.progress.last

    @property
    def recentProgress(self) -> list[dict[str, Any]]:
        """The progress of recent epochs."""
        return self._execution.progress.recent

    def exception(self) -> Exception | None:
        """What ended the query: Penstock's own error where it was one, else Spark's."""
        error = self._execution.failure
        return None if error is None else plain(error)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        """Wait until the query ends, or for ``timeout`` seconds; raise what ended it, if anything did."""
        ended = self._execution.join(timeout)
        self._raise()
        return None if timeout is None else ended

    def awaitEpoch(self, number: int, timeout: float | None = None) -> bool:
        """Wait until an epoch is committed, or for ``timeout`` seconds; whether it is."""
        reached = self._execution.await_epoch(number, timeout)
        self._raise()
        return reached

    def processAllAvailable(self) -> None:
        """Wait until all that was in the source has been processed and committed."""
        ends = self._source.ends()
        self._execution.await_rest(lambda at: all(at.get(part, 0) >= end for part, end in ends.items()))
        self._raise()

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        """Finish the epoch in hand, then stop; True if it was finished.

        Afterwards consumer, safe offset and checkpoint are level.

        Parameters
        ----------
        timeout
            Seconds to wait for the epoch in hand; then it is broken off, and repeated by the next run.
        """
        finished = self._execution.stop(timeout)
        if finished and self._temporary is not None:
            shutil.rmtree(self._temporary, ignore_errors=True)
        return finished

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error from None
