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
    │   │   └── StoreLocked
    │   ├── StoreNotFound
    │   ├── StoreFull
    │   ├── StoreReadOnly
    │   ├── StoreTooNew
    │   ├── StoreUnsafe
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


def error_class(name: str) -> type[PenstockError] | None:
    """The error of that name, which came as text; None where there is none, whatever else is called so here."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, PenstockError) else None


class InvalidInput(PenstockError, ValueError):
    """The caller passed something that cannot be right."""

    condition = "INVALID_INPUT"


class InvalidUrl(InvalidInput):
    """A store's or a feed's URL is not one, or leads nowhere that could be meant."""

    condition = "INVALID_URL"


class InvalidName(InvalidInput):
    """A name is empty, too long, or has a character that no name can have."""

    condition = "INVALID_NAME"


class InvalidOption(InvalidInput):
    """An option is unknown, has a bad value, is missing, or does not go together with another one."""

    condition = "INVALID_OPTION"


class InvalidChangeOption(InvalidOption):
    """An option of a change feed is wrong; the sub-condition says which."""

    condition = "INVALID_CDC_OPTION"


class InvalidPosition(InvalidInput):
    """A row index or a time at which there is nothing, or that lies the wrong way round."""

    condition = "INVALID_POSITION"


class UnsupportedType(InvalidInput):
    """A column has a type that a queue or a table does not take."""

    condition = "UNSUPPORTED_TYPE"


class SchemaMismatch(InvalidInput):
    """Rows do not fit the queue or the table; the message names each difference."""

    condition = "SCHEMA_MISMATCH"


class InvalidChangelogSchema(SchemaMismatch):
    """The columns of a change feed are not what its contract or its options ask for."""

    condition = "INVALID_CHANGELOG_SCHEMA"


class NotFound(PenstockError, LookupError):
    """What was asked for is not there."""

    condition = "NOT_FOUND"


class QueueNotFound(NotFound):
    """The store has no queue of that name."""

    condition = "QUEUE_NOT_FOUND"


class ConsumerNotFound(NotFound):
    """The store has no consumer of that name."""

    condition = "CONSUMER_NOT_FOUND"


class NotRegistered(NotFound):
    """The consumer is not registered on that queue."""

    condition = "CONSUMER_NOT_REGISTERED"


class PartitionNotFound(NotFound):
    """The queue has no partition of that number."""

    condition = "PARTITION_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """There is no checkpoint of a streaming query at a path."""

    condition = "CHECKPOINT_NOT_FOUND"


class AlreadyExists(PenstockError):
    """There is a queue or a consumer of that name already."""

    condition = "ALREADY_EXISTS"


class MissingDependency(PenstockError, ImportError):
    """A package is not installed; the message says what to install."""

    condition = "MISSING_DEPENDENCY"


class StoreError(PenstockError):
    """The database cannot do it."""

    condition = "STORE_ERROR"


class StoreUnavailable(StoreError):
    """The database does not answer, or went away; retried with back-off before it is raised."""

    condition = "STORE_UNAVAILABLE"


class StoreLocked(StoreUnavailable):
    """Another writer has a lock for longer than this one waits; nothing of the transaction was written."""

    condition = "STORE_LOCKED"


class StoreNotFound(StoreError):
    """There is no store at the URL, and none was to be made."""

    condition = "STORE_NOT_FOUND"


class StoreFull(StoreError):
    """The disk or the quota of the database is full; nothing of the transaction was written."""

    condition = "STORE_FULL"


class StoreReadOnly(StoreError):
    """The file, the server or the role may not write here."""

    condition = "STORE_READ_ONLY"


class StoreTooNew(StoreError):
    """A newer Penstock made the store: upgrade Penstock."""

    condition = "STORE_TOO_NEW"


class StoreUnsafe(StoreError):
    """Somebody else could replace, read or lock the store's files, or owns its schema; the sub-condition says how."""

    condition = "STORE_UNSAFE"


class CommitOutcomeUnknown(StoreError):
    """The connection broke while a transaction was committing: it may or may not have happened."""

    condition = "COMMIT_OUTCOME_UNKNOWN"


class DataLost(PenstockError):
    """Rows or commits that were asked for are gone: trimmed, vacuumed or expired."""

    condition = "DATA_LOST"


class FeedUnavailable(PenstockError):
    """A system gives no change feed as it is set up, or as it is asked; the sub-condition says what is amiss."""

    condition = "FEED_UNAVAILABLE"


class ChangelogContractViolation(PenstockError):
    """A change feed does not keep what its contract promises; a result would have been wrong without a word."""

    condition = "CHANGELOG_CONTRACT_VIOLATION"


class Conflict(PenstockError):
    """Somebody else moved it first."""

    condition = "CONFLICT"


class OffsetConflict(Conflict):
    """A consumer does not stand where the caller, or the checkpoint, says that it stands."""

    condition = "OFFSET_CONFLICT"


class CommitOutOfOrder(Conflict):
    """A commit of a change feed is not behind the newest one."""

    condition = "COMMIT_OUT_OF_ORDER"


class ConsumerInUse(Conflict):
    """A running query owns the consumer."""

    condition = "CONSUMER_IN_USE"


class OwnerFenced(Conflict):
    """Another query has taken the consumer over; this one has come to its end."""

    condition = "OWNER_FENCED"


class ProducerFenced(Conflict):
    """Somebody else has opened the producer session since."""

    condition = "PRODUCER_FENCED"


class CommitRefused(PenstockError):
    """A micro-batch that would lose or repeat rows; nothing of it is visible."""

    condition = "COMMIT_REFUSED"


class CheckpointMismatch(CommitRefused):
    """The checkpoint is not the one that the sink, or the consumer, knows."""

    condition = "CHECKPOINT_MISMATCH"


class PlanMismatch(CommitRefused):
    """The micro-batch is not the one that the owner of the consumer has planned."""

    condition = "PLAN_MISMATCH"


class ConsumerBound(CommitRefused):
    """The consumer belongs to another checkpoint, and a stateful query would lose its state."""

    condition = "CONSUMER_BOUND"


class CheckpointRewound(CommitRefused):
    """The checkpoint is older than what the sink has: a copy, or one that was restored alone."""

    condition = "CHECKPOINT_REWOUND"


class OutputModeRefused(PenstockError):
    """An output mode that would lose or repeat rows, or that Spark does not start; the report says why."""

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
    """A run of a continuous query came to nothing; the sub-condition says how."""

    condition = "CONTINUOUS_FAILED"


class QueryFailed(PenstockError):
    """A streaming query ended with an error that is not one of the others."""

    condition = "QUERY_FAILED"
