"""A running continuous query."""

from __future__ import annotations

from typing import Any

from pyspark.sql.streaming.listener import StreamingQueryProgress

from penstock.continuous.connectors.protocol import SourceDriver
from penstock.continuous.driver.execution import ContinuousExecution, State
from penstock.pipeline.failures import plain
from penstock.pipeline.query import STOP_SECONDS, Query


class ContinuousQuery(Query):
    """A query of a pipeline that runs with the continuous trigger."""

    def __init__(self, execution: ContinuousExecution, source: SourceDriver) -> None:
        self._execution, self._source = execution, source

    @property
    def id(self) -> str:
        return self._execution.id

    @property
    def runId(self) -> str:
        return self._execution.run_id

    @property
    def name(self) -> str | None:
        return self._execution.name

    @property
    def state(self) -> str:
        """INITIALIZING, ACTIVE, RECONFIGURING or TERMINATED."""
        return self._execution.state.value

    @property
    def isActive(self) -> bool:
        return self._execution.state is not State.TERMINATED

    @property
    def status(self) -> dict[str, Any]:
        active = self._execution.state is State.ACTIVE
        ending = self._execution.ending
        told = self.state if ending is None else f"{self.state}: {ending}"
        return {"message": told, "isDataAvailable": active, "isTriggerActive": active}

    @property
    def lastProgress(self) -> StreamingQueryProgress | None:
        return self._execution.progress.last

    @property
    def recentProgress(self) -> list[StreamingQueryProgress]:
        return self._execution.progress.recent

    def exception(self) -> Exception | None:
        error = self._execution.failure
        return None if error is None else plain(error)

    def awaitTermination(self, timeout: float | None = None) -> bool | None:
        ended = self._execution.join(timeout)
        self._raise()
        return None if timeout is None else ended

    def awaitEpoch(self, number: int, timeout: float | None = None) -> bool:
        """Wait until an epoch is committed; whether it is.

        Parameters
        ----------
        number
            The epoch's number.
        timeout
            Seconds to wait; for ever when None.
        """
        reached = self._execution.await_epoch(number, timeout)
        self._raise()
        return reached

    def processAllAvailable(self) -> None:
        ends = self._source.ends()
        self._execution.await_rest(lambda at: all(at.get(part, 0) >= end for part, end in ends.items()))
        self._raise()

    def stop(self, timeout: float = STOP_SECONDS) -> bool:
        return self._execution.stop(timeout)

    def _raise(self) -> None:
        error = self.exception()
        if error is not None:
            raise error from None
