"""Everything Penstock raises on purpose.

::

    PenstockError
    ├── InvalidInput (ValueError)     the caller passed something that cannot be right
    │   ├── InvalidUrl
    │   ├── InvalidName
    │   ├── InvalidOption
    │   │   └── InvalidChangeOption
    │   ├── InvalidPosition
    │   ├── UnsupportedType
    │   └── SchemaMismatch
    │       └── InvalidChangelogSchema
    ├── NotFound (LookupError)
    │   ├── QueueNotFound
    │   ├── ConsumerNotFound
    │   ├── NotRegistered
    │   ├── PartitionNotFound
    │   └── CheckpointNotFound
    ├── AlreadyExists
    ├── MissingDependency (ImportError)
    ├── StoreError                    the database cannot do it
    │   ├── StoreUnavailable
    │   ├── StoreNotFound
    │   ├── StoreFull
    │   ├── StoreReadOnly
    │   ├── StoreTooNew
    │   └── CommitOutcomeUnknown
    ├── DataLost                      rows that were asked for have been trimmed
    ├── FeedUnavailable               a system gives no change feed as it is set up now
    ├── ChangelogContractViolation    a change feed does not keep its promise
    ├── Conflict                      somebody else moved it first
    │   ├── OffsetConflict
    │   ├── CommitOutOfOrder
    │   ├── ConsumerInUse
    │   ├── OwnerFenced
    │   └── ProducerFenced
    ├── CommitRefused                 a micro-batch that would lose or repeat rows
    │   ├── CheckpointMismatch
    │   ├── PlanMismatch
    │   ├── ConsumerBound
    │   └── CheckpointRewound
    ├── OutputModeRefused             an output mode that would lose or repeat rows, or that Spark does not start
    ├── ContinuousRefused             what a continuous query cannot do
    ├── TableRefused                  rows that a table cannot take as it is asked to
    ├── StateRefused                  what a checkpoint's state cannot be asked
    ├── ContinuousFailed              a run of a continuous query came to nothing
    └── QueryFailed                   a streaming query ended with an error

Each error has a ``condition`` (a stable name to test for), ``parameters`` (the values it is about) and a message that says
what happened, with which value, and the way out.
"""

from __future__ import annotations

from typing import Any


class PenstockError(Exception):
    """Base of all Penstock errors.

    Parameters
    ----------
    message
        What happened and the way out, in one sentence or two, never with a secret in it.
    condition
        Overrides the class's condition name, for the sub-conditions of one kind of error.
    parameters
        The values the message is about.
    """

    condition: str = "PENSTOCK_ERROR"

    def __init__(self, message: str, *, condition: str | None = None, **parameters: Any) -> None:
        super().__init__(message)
        self.message = message
        self.parameters = parameters
        if condition is not None:
            self.condition = condition

    def __str__(self) -> str:
        return f"[{self.condition}] {self.message}"

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.condition, self.parameters)


def _rebuild(
    kind: type[PenstockError], message: str, condition: str, parameters: dict[str, Any]
) -> PenstockError:
    return kind(message, condition=condition, **parameters)


def condition_of(error: BaseException) -> str:
    """The condition of an error, as a log's field has it; of another package's error the name of its class."""
    return error.condition if isinstance(error, PenstockError) else type(error).__name__


class InvalidInput(PenstockError, ValueError):
    condition = "INVALID_INPUT"


class InvalidUrl(InvalidInput):
    condition = "INVALID_URL"


class InvalidName(InvalidInput):
    condition = "INVALID_NAME"


class InvalidOption(InvalidInput):
    condition = "INVALID_OPTION"


class InvalidChangeOption(InvalidOption):
    condition = "INVALID_CDC_OPTION"


class InvalidPosition(InvalidInput):
    condition = "INVALID_POSITION"


class UnsupportedType(InvalidInput):
    condition = "UNSUPPORTED_TYPE"


class SchemaMismatch(InvalidInput):
    condition = "SCHEMA_MISMATCH"


class InvalidChangelogSchema(SchemaMismatch):
    condition = "INVALID_CHANGELOG_SCHEMA"


class NotFound(PenstockError, LookupError):
    condition = "NOT_FOUND"


class QueueNotFound(NotFound):
    condition = "QUEUE_NOT_FOUND"


class ConsumerNotFound(NotFound):
    condition = "CONSUMER_NOT_FOUND"


class NotRegistered(NotFound):
    condition = "CONSUMER_NOT_REGISTERED"


class PartitionNotFound(NotFound):
    condition = "PARTITION_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """There is no checkpoint of a streaming query at a path."""

    condition = "CHECKPOINT_NOT_FOUND"


class AlreadyExists(PenstockError):
    condition = "ALREADY_EXISTS"


class MissingDependency(PenstockError, ImportError):
    condition = "MISSING_DEPENDENCY"


class StoreError(PenstockError):
    condition = "STORE_ERROR"


class StoreUnavailable(StoreError):
    """The database does not answer, or went away; retried with back-off before it is raised."""

    condition = "STORE_UNAVAILABLE"


class StoreNotFound(StoreError):
    condition = "STORE_NOT_FOUND"


class StoreFull(StoreError):
    condition = "STORE_FULL"


class StoreReadOnly(StoreError):
    condition = "STORE_READ_ONLY"


class StoreTooNew(StoreError):
    condition = "STORE_TOO_NEW"


class CommitOutcomeUnknown(StoreError):
    """The connection broke while a transaction was committing: it may or may not have happened."""

    condition = "COMMIT_OUTCOME_UNKNOWN"


class DataLost(PenstockError):
    condition = "DATA_LOST"


class FeedUnavailable(PenstockError):
    """A system gives no change feed as it is set up, or as it is asked; the sub-condition says what is amiss."""

    condition = "FEED_UNAVAILABLE"


class ChangelogContractViolation(PenstockError):
    """A change feed does not keep what its contract promises; a result would have been wrong without a word."""

    condition = "CHANGELOG_CONTRACT_VIOLATION"


class Conflict(PenstockError):
    condition = "CONFLICT"


class OffsetConflict(Conflict):
    condition = "OFFSET_CONFLICT"


class CommitOutOfOrder(Conflict):
    """A commit of a change feed is not behind the newest one."""

    condition = "COMMIT_OUT_OF_ORDER"


class ConsumerInUse(Conflict):
    condition = "CONSUMER_IN_USE"


class OwnerFenced(Conflict):
    condition = "OWNER_FENCED"


class ProducerFenced(Conflict):
    condition = "PRODUCER_FENCED"


class CommitRefused(PenstockError):
    condition = "COMMIT_REFUSED"


class CheckpointMismatch(CommitRefused):
    condition = "CHECKPOINT_MISMATCH"


class PlanMismatch(CommitRefused):
    condition = "PLAN_MISMATCH"


class ConsumerBound(CommitRefused):
    condition = "CONSUMER_BOUND"


class CheckpointRewound(CommitRefused):
    condition = "CHECKPOINT_REWOUND"


class OutputModeRefused(PenstockError):
    condition = "OUTPUT_MODE_REFUSED"


class ContinuousRefused(PenstockError):
    """A continuous query cannot do what it is asked to; the sub-condition says what is amiss."""

    condition = "CONTINUOUS_REFUSED"


class TableRefused(PenstockError):
    """A table cannot take rows as it is asked to; the sub-condition says what is amiss."""

    condition = "TABLE_REFUSED"


class StateRefused(PenstockError):
    """A checkpoint's state cannot be read as it is asked for; the sub-condition says what is amiss."""

    condition = "STATE_REFUSED"


class ContinuousFailed(PenstockError):
    condition = "CONTINUOUS_FAILED"


class QueryFailed(PenstockError):
    condition = "QUERY_FAILED"
