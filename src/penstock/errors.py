"""The exceptions that Penstock raises.

::

    PenstockError
    ├── InvalidInput (ValueError)     an argument, option or row is invalid
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
    ├── StoreError                    the database cannot do what was asked
    │   ├── StoreUnavailable
    │   │   └── StoreLocked
    │   ├── StoreNotFound
    │   ├── StoreFull
    │   ├── StoreReadOnly
    │   ├── StoreTooNew
    │   ├── StoreUnsafe
    │   └── CommitOutcomeUnknown
    ├── DataLost                      rows or commits to read no longer exist
    ├── FeedUnavailable               a system cannot serve a change feed as it is set up
    ├── ChangelogContractViolation    a change feed breaks its contract
    ├── Conflict                      another program changed it first
    │   ├── OffsetConflict
    │   ├── CommitOutOfOrder
    │   ├── ConsumerInUse
    │   ├── OwnerFenced
    │   └── ProducerFenced
    ├── CommitRefused                 a micro-batch would lose or repeat rows
    │   ├── CheckpointMismatch
    │   ├── PlanMismatch
    │   ├── ConsumerBound
    │   └── CheckpointRewound
    ├── OutputModeRefused             an output mode would lose or repeat rows, or Spark refuses it
    ├── ContinuousRefused             a continuous query cannot do what was asked
    ├── TableRefused                  a table cannot take the rows as asked
    ├── StateRefused                  a checkpoint's state cannot be read as asked
    ├── ContinuousFailed              a continuous query failed
    └── QueryFailed                   a streaming query ended with an error

Each error has a ``condition`` (a stable name to test for), ``parameters`` (the values it is about) and a
message that says what failed, with which value, and what to do.
"""

from __future__ import annotations

from typing import Any


class PenstockError(Exception):
    """Base class of all exceptions of Penstock.

    Parameters
    ----------
    message
        What failed and what to do, in one or two sentences; never with a secret in it.
    condition
        A more specific condition than the class's.
    parameters
        The values the message is about.
    """

    condition: str = "PENSTOCK_ERROR"

    def __init__(self, message: str, *, condition: str | None = None, **parameters: object) -> None:
        super().__init__(message)
        self.message = message
        self.parameters: dict[str, Any] = parameters
        if condition is not None:
            self.condition = condition

    def __str__(self) -> str:
        return f"[{self.condition}] {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return _rebuild, (type(self), self.message, self.condition, self.parameters)


def _rebuild(
    kind: type[PenstockError], message: str, condition: str, parameters: dict[str, object]
) -> PenstockError:
    return kind(message, condition=condition, **parameters)


def condition_of(error: BaseException) -> str:
    """Return the condition of an error for a log record; for another package's error, its class's name."""
    return error.condition if isinstance(error, PenstockError) else type(error).__name__


def error_class(name: str) -> type[PenstockError] | None:
    """Return the exception class of this module with that name, or None."""
    found = globals().get(name)
    return found if isinstance(found, type) and issubclass(found, PenstockError) else None


class InvalidInput(PenstockError, ValueError):
    """An argument, an option or a row is invalid."""

    condition = "INVALID_INPUT"


class InvalidUrl(InvalidInput):
    """The URL of a store or a feed is malformed, or of an unknown kind."""

    condition = "INVALID_URL"


class InvalidName(InvalidInput):
    """A name is empty, too long, or has a character that names cannot have."""

    condition = "INVALID_NAME"


class InvalidOption(InvalidInput):
    """An option is unknown, missing, has an invalid value, or conflicts with another option."""

    condition = "INVALID_OPTION"


class InvalidChangeOption(InvalidOption):
    """An option of a change feed is invalid; the sub-condition says which."""

    condition = "INVALID_CDC_OPTION"


class InvalidPosition(InvalidInput):
    """A row index or a time is out of range, or a start is after its end."""

    condition = "INVALID_POSITION"


class UnsupportedType(InvalidInput):
    """A column has a type that a queue or a table cannot store."""

    condition = "UNSUPPORTED_TYPE"


class SchemaMismatch(InvalidInput):
    """Rows do not fit the queue or the table; the message names each difference."""

    condition = "SCHEMA_MISMATCH"


class InvalidChangelogSchema(SchemaMismatch):
    """The columns of a change feed do not match its contract or its options."""

    condition = "INVALID_CHANGELOG_SCHEMA"


class NotFound(PenstockError, LookupError):
    """Something that was named does not exist."""

    condition = "NOT_FOUND"


class QueueNotFound(NotFound):
    """The store has no queue with that name."""

    condition = "QUEUE_NOT_FOUND"


class ConsumerNotFound(NotFound):
    """The store has no consumer with that name."""

    condition = "CONSUMER_NOT_FOUND"


class NotRegistered(NotFound):
    """The consumer is not registered on that queue."""

    condition = "CONSUMER_NOT_REGISTERED"


class PartitionNotFound(NotFound):
    """The queue has no partition with that number."""

    condition = "PARTITION_NOT_FOUND"


class CheckpointNotFound(NotFound):
    """A path has no checkpoint of a streaming query."""

    condition = "CHECKPOINT_NOT_FOUND"


class AlreadyExists(PenstockError):
    """A queue or a consumer with that name exists already."""

    condition = "ALREADY_EXISTS"


class MissingDependency(PenstockError, ImportError):
    """A package is not installed; the message says how to install it."""

    condition = "MISSING_DEPENDENCY"


class StoreError(PenstockError):
    """The database cannot do what was asked."""

    condition = "STORE_ERROR"


class StoreUnavailable(StoreError):
    """The database does not answer, or closed the connection; raised after retries with back-off."""

    condition = "STORE_UNAVAILABLE"


class StoreLocked(StoreUnavailable):
    """Another writer held a lock for longer than this one waits; nothing of the transaction was written."""

    condition = "STORE_LOCKED"


class StoreNotFound(StoreError):
    """The URL has no store, and the call does not create one."""

    condition = "STORE_NOT_FOUND"


class StoreFull(StoreError):
    """The disk or the database's quota is full; nothing of the transaction was written."""

    condition = "STORE_FULL"


class StoreReadOnly(StoreError):
    """The file, the server or the role is read-only."""

    condition = "STORE_READ_ONLY"


class StoreTooNew(StoreError):
    """A newer version of Penstock created the store: upgrade Penstock."""

    condition = "STORE_TOO_NEW"


class StoreUnsafe(StoreError):
    """Other users could replace, read or lock the store's files, or own its schema; the sub-condition says
    how.
    """

    condition = "STORE_UNSAFE"


class CommitOutcomeUnknown(StoreError):
    """The connection broke during a commit, which may or may not have happened."""

    condition = "COMMIT_OUTCOME_UNKNOWN"


class DataLost(PenstockError):
    """Rows or commits to read no longer exist: they were trimmed, vacuumed or expired."""

    condition = "DATA_LOST"


class FeedUnavailable(PenstockError):
    """A system cannot serve the change feed as it is set up, or as asked; the sub-condition says why."""

    condition = "FEED_UNAVAILABLE"


class ChangelogContractViolation(PenstockError):
    """A change feed breaks its contract; the result would have been silently wrong."""

    condition = "CHANGELOG_CONTRACT_VIOLATION"


class Conflict(PenstockError):
    """Another program changed it first."""

    condition = "CONFLICT"


class OffsetConflict(Conflict):
    """A consumer's offset is not the one that the caller, or the checkpoint, expects."""

    condition = "OFFSET_CONFLICT"


class CommitOutOfOrder(Conflict):
    """A commit of a change feed is not newer than the newest one."""

    condition = "COMMIT_OUT_OF_ORDER"


class ConsumerInUse(Conflict):
    """A running query owns the consumer."""

    condition = "CONSUMER_IN_USE"


class OwnerFenced(Conflict):
    """Another query has taken the consumer over, so this one ends."""

    condition = "OWNER_FENCED"


class ProducerFenced(Conflict):
    """Another program has opened the producer session since."""

    condition = "PRODUCER_FENCED"


class CommitRefused(PenstockError):
    """A micro-batch would lose or repeat rows; none of it is visible."""

    condition = "COMMIT_REFUSED"


class CheckpointMismatch(CommitRefused):
    """The checkpoint is not the one that the sink, or the consumer, was used with."""

    condition = "CHECKPOINT_MISMATCH"


class PlanMismatch(CommitRefused):
    """The micro-batch is not the one that the owner of the consumer planned."""

    condition = "PLAN_MISMATCH"


class ConsumerBound(CommitRefused):
    """The consumer belongs to another checkpoint, and a stateful query would lose its state."""

    condition = "CONSUMER_BOUND"


class CheckpointRewound(CommitRefused):
    """The checkpoint is older than the sink's last commit: it is a copy, or was restored without the sink."""

    condition = "CHECKPOINT_REWOUND"


class OutputModeRefused(PenstockError):
    """An output mode would lose or repeat rows, or Spark does not start it; the report says why."""

    condition = "OUTPUT_MODE_REFUSED"


class ContinuousRefused(PenstockError):
    """A continuous query cannot do what was asked; the sub-condition says why."""

    condition = "CONTINUOUS_REFUSED"


class TableRefused(PenstockError):
    """A table cannot take the rows as asked; the sub-condition says why."""

    condition = "TABLE_REFUSED"


class StateRefused(PenstockError):
    """A checkpoint's state cannot be read as asked; the sub-condition says why."""

    condition = "STATE_REFUSED"


class ContinuousFailed(PenstockError):
    """A continuous query failed; the sub-condition says how."""

    condition = "CONTINUOUS_FAILED"


class QueryFailed(PenstockError):
    """A streaming query ended with an error that no other class covers."""

    condition = "QUERY_FAILED"
