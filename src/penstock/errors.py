"""The exceptions that Penstock raises.

::

    PenstockError
    ├── InvalidInputError (ValueError)        an argument, option or row is invalid
    │   ├── InvalidUrlError
    │   ├── InvalidNameError
    │   ├── InvalidOptionError
    │   │   └── InvalidChangeOptionError
    │   ├── InvalidPositionError
    │   ├── UnsupportedTypeError
    │   └── SchemaMismatchError
    │       └── InvalidChangelogSchemaError
    ├── NotFoundError (LookupError)
    │   ├── QueueNotFoundError
    │   ├── ConsumerNotFoundError
    │   ├── NotRegisteredError
    │   ├── PartitionNotFoundError
    │   └── CheckpointNotFoundError
    ├── AlreadyExistsError
    ├── MissingDependencyError (ImportError)
    ├── StoreError                            the database cannot do what was asked
    │   ├── StoreUnavailableError
    │   │   └── StoreLockedError
    │   ├── StoreNotFoundError
    │   ├── StoreFullError
    │   ├── StoreReadOnlyError
    │   ├── StoreTooNewError
    │   ├── StoreUnsafeError
    │   └── CommitOutcomeUnknownError
    ├── DataLostError                         rows or commits to read no longer exist
    ├── FeedUnavailableError                  a system cannot serve a change feed as it is set up
    ├── ChangelogContractViolationError       a change feed breaks its contract
    ├── ConflictError                         another program changed it first
    │   ├── OffsetConflictError
    │   ├── CommitOutOfOrderError
    │   ├── ConsumerInUseError
    │   ├── OwnerFencedError
    │   └── ProducerFencedError
    ├── CommitRefusedError                    a micro-batch would lose or repeat rows
    │   ├── CheckpointMismatchError
    │   ├── PlanMismatchError
    │   ├── ConsumerBoundError
    │   └── CheckpointRewoundError
    ├── OutputModeRefusedError                an output mode would lose or repeat rows, or Spark refuses it
    ├── ContinuousRefusedError                a continuous query cannot do what was asked
    ├── TableRefusedError                     a table cannot take the rows as asked
    ├── StateRefusedError                     a checkpoint's state cannot be read as asked
    ├── ContinuousFailedError                 a continuous query failed
    └── QueryFailedError                      a streaming query ended with an error

Each error has a ``condition`` (a stable name to test for), ``parameters`` (the values it is about), a message
that says what failed, with which value, and what to do, and a ``help_url``, which a traceback shows too.
"""

from __future__ import annotations

import re
from functools import partial
from typing import Any

DOCS_URL = "https://penstock-spark.github.io/penstock/"

# A URL can appear in any message, if a user has mistaken one argument for another.
_PASSWORD_IN_URL = re.compile(r"(//[^\s/:@]*:)\S+@|([?&](?:ssl)?password=)[^\s&'\"]*")


def _without_passwords(value: Any) -> Any:
    """Return a text, or a list of texts, without the passwords of the URLs in it."""
    if isinstance(value, str):
        return _PASSWORD_IN_URL.sub(_starred, value)
    return [_without_passwords(each) for each in value] if isinstance(value, list | tuple) else value


def _starred(match: re.Match[str]) -> str:
    return f"{match[1]}***@" if match[1] else f"{match[2]}***"


class PenstockError(Exception):
    """Base class of all exceptions of Penstock.

    Parameters
    ----------
    message
        What failed and what to do, in one or two sentences. Passwords of URLs in it are removed.
    condition
        A more specific condition than the class's.
    parameters
        The values the message is about.
    """

    condition: str = "PENSTOCK_ERROR"

    def __init__(self, message: str, *, condition: str | None = None, **parameters: object) -> None:
        self.message = _without_passwords(message)
        super().__init__(self.message)
        self.parameters: dict[str, Any] = {
            name: _without_passwords(value) for name, value in parameters.items()
        }
        if condition is not None:
            self.condition = condition
        if self.help_url is not None:
            self.add_note(f"Help: {self.help_url}")

    @property
    def help_url(self) -> str | None:
        """The address of the condition's description in the documentation; None if it has none."""
        return f"{DOCS_URL}problems/#{self.condition.lower().replace('.', '-')}"

    def __str__(self) -> str:
        return f"[{self.condition}] {self.message}"

    def __reduce__(self) -> tuple[object, ...]:
        return partial(type(self), self.message, condition=self.condition, **self.parameters), ()


def condition_of(error: BaseException) -> str:
    """Return the condition of an error for a log record; for another package's error, its class's name."""
    return error.condition if isinstance(error, PenstockError) else type(error).__name__


def error_class(name: str) -> type[PenstockError] | None:
    """Return the exception class of this module with that name, or None."""
    value = globals().get(name)
    return value if isinstance(value, type) and issubclass(value, PenstockError) else None


class InvalidInputError(PenstockError, ValueError):
    """An argument, an option or a row is invalid."""

    condition = "INVALID_INPUT"


class InvalidUrlError(InvalidInputError):
    """The URL of a store or a feed is malformed, or of an unknown kind."""

    condition = "INVALID_URL"


class InvalidNameError(InvalidInputError):
    """A name is empty, too long, or has a character that names cannot have."""

    condition = "INVALID_NAME"


class InvalidOptionError(InvalidInputError):
    """An option is unknown, missing, has an invalid value, or conflicts with another option."""

    condition = "INVALID_OPTION"


class InvalidChangeOptionError(InvalidOptionError):
    """An option of a change feed is invalid; the sub-condition says which."""

    condition = "INVALID_CDC_OPTION"


class InvalidPositionError(InvalidInputError):
    """A row index or a time is out of range, or a start is after its end."""

    condition = "INVALID_POSITION"


class UnsupportedTypeError(InvalidInputError):
    """A column has a type that a queue or a table cannot store."""

    condition = "UNSUPPORTED_TYPE"


class SchemaMismatchError(InvalidInputError):
    """Rows do not fit the queue or the table; the message names each difference."""

    condition = "SCHEMA_MISMATCH"


class InvalidChangelogSchemaError(SchemaMismatchError):
    """The columns of a change feed do not match its contract or its options."""

    condition = "INVALID_CHANGELOG_SCHEMA"


class NotFoundError(PenstockError, LookupError):
    """Something that was named does not exist."""

    condition = "NOT_FOUND"


class QueueNotFoundError(NotFoundError):
    """The store has no queue with that name."""

    condition = "QUEUE_NOT_FOUND"


class ConsumerNotFoundError(NotFoundError):
    """The store has no consumer with that name."""

    condition = "CONSUMER_NOT_FOUND"


class PumpNotFoundError(NotFoundError):
    """The store has no pump with that name."""

    condition = "PUMP_NOT_FOUND"


class NotRegisteredError(NotFoundError):
    """The consumer is not registered on that queue."""

    condition = "CONSUMER_NOT_REGISTERED"


class PartitionNotFoundError(NotFoundError):
    """The queue has no partition with that number."""

    condition = "PARTITION_NOT_FOUND"


class CheckpointNotFoundError(NotFoundError):
    """A path has no checkpoint of a streaming query."""

    condition = "CHECKPOINT_NOT_FOUND"


class AlreadyExistsError(PenstockError):
    """A queue or a consumer with that name already exists."""

    condition = "ALREADY_EXISTS"


class MissingDependencyError(PenstockError, ImportError):
    """A package is not installed; the message says how to install it."""

    condition = "MISSING_DEPENDENCY"


class StoreError(PenstockError):
    """The database cannot do what was asked."""

    condition = "STORE_ERROR"


class StoreUnavailableError(StoreError):
    """The database does not answer, or closed the connection; raised after retries with back-off."""

    condition = "STORE_UNAVAILABLE"


class StoreLockedError(StoreUnavailableError):
    """Another writer held a lock for longer than this one waits; nothing of the transaction was written."""

    condition = "STORE_LOCKED"


class StoreNotFoundError(StoreError):
    """The URL has no store, and the call does not create one."""

    condition = "STORE_NOT_FOUND"


class StoreFullError(StoreError):
    """The disk or the database's quota is full; nothing of the transaction was written."""

    condition = "STORE_FULL"


class StoreReadOnlyError(StoreError):
    """The file, the server or the role is read-only."""

    condition = "STORE_READ_ONLY"


class StoreTooNewError(StoreError):
    """A newer version of Penstock created the store: upgrade Penstock."""

    condition = "STORE_TOO_NEW"


class StoreUnsafeError(StoreError):
    """Other users could replace, read or lock the store's files, read its password, or own its schema or
    tables; the sub-condition says how.
    """

    condition = "STORE_UNSAFE"


class CommitOutcomeUnknownError(StoreError):
    """The connection broke during a commit, which may or may not have happened."""

    condition = "COMMIT_OUTCOME_UNKNOWN"


class DataLostError(PenstockError):
    """Rows or commits to read no longer exist: they were trimmed, vacuumed or expired."""

    condition = "DATA_LOST"


class FeedUnavailableError(PenstockError):
    """A system cannot serve the change feed as it is set up, or as asked; the sub-condition says why."""

    condition = "FEED_UNAVAILABLE"


class ChangelogContractViolationError(PenstockError):
    """A change feed breaks its contract; the result would have been silently wrong."""

    condition = "CHANGELOG_CONTRACT_VIOLATION"


class ConflictError(PenstockError):
    """Another program changed it first."""

    condition = "CONFLICT"


class OffsetConflictError(ConflictError):
    """A consumer's offset is not the one that the caller, or the checkpoint, expects."""

    condition = "OFFSET_CONFLICT"


class CommitOutOfOrderError(ConflictError):
    """A commit of a change feed is not newer than the newest one."""

    condition = "COMMIT_OUT_OF_ORDER"


class ConsumerInUseError(ConflictError):
    """A running query owns the consumer."""

    condition = "CONSUMER_IN_USE"


class OwnerFencedError(ConflictError):
    """Another query has taken the consumer over, so this one ends."""

    condition = "OWNER_FENCED"


class ProducerFencedError(ConflictError):
    """Another program has opened the producer session since."""

    condition = "PRODUCER_FENCED"


class CommitRefusedError(PenstockError):
    """A micro-batch would lose or repeat rows; none of it is visible."""

    condition = "COMMIT_REFUSED"


class CheckpointMismatchError(CommitRefusedError):
    """The checkpoint is not the one that the sink, or the consumer, was used with."""

    condition = "CHECKPOINT_MISMATCH"


class PlanMismatchError(CommitRefusedError):
    """The micro-batch is not the one that the owner of the consumer planned."""

    condition = "PLAN_MISMATCH"


class ConsumerBoundError(CommitRefusedError):
    """The consumer belongs to another checkpoint, and a stateful query would lose its state."""

    condition = "CONSUMER_BOUND"


class CheckpointRewoundError(CommitRefusedError):
    """The checkpoint is older than the sink's last commit: it is a copy, or was restored without the sink."""

    condition = "CHECKPOINT_REWOUND"


class OutputModeRefusedError(PenstockError):
    """An output mode would lose or repeat rows, or Spark does not start it; the report says why."""

    condition = "OUTPUT_MODE_REFUSED"

    @property
    def help_url(self) -> str | None:
        """The address of the section about the first problem."""
        return self.parameters.get("page") or super().help_url


class ContinuousRefusedError(PenstockError):
    """A continuous query cannot do what was asked; the sub-condition says why."""

    condition = "CONTINUOUS_REFUSED"


class TableRefusedError(PenstockError):
    """A table cannot take the rows as asked; the sub-condition says why."""

    condition = "TABLE_REFUSED"


class StateRefusedError(PenstockError):
    """A checkpoint's state cannot be read as asked; the sub-condition says why."""

    condition = "STATE_REFUSED"


class ContinuousFailedError(PenstockError):
    """A continuous query failed; the sub-condition says how."""

    condition = "CONTINUOUS_FAILED"


class QueryFailedError(PenstockError):
    """A streaming query ended with an error that no other class covers."""

    condition = "QUERY_FAILED"
