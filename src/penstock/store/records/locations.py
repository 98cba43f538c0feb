"""Places of objects, and the one database that each belongs to.

A copy of a store refers to the same objects as the original. It may read them; but neither of the two knows
which objects the other needs, so that only one may write and delete there.
"""

from __future__ import annotations

from penstock.errors import StoreError, StoreNotFoundError
from penstock.store.database import Transaction


def enter_location(tx: Transaction, location: str, cleaned_at: int) -> None:
    """Enter a location as this database's, if the store does not have it."""
    tx.run("insert_location", payloads=location, now=cleaned_at, instance=tx.instance())


def require_own_location(tx: Transaction, store: str, location: str) -> None:
    """Refuse a location that belongs to another copy of the store, or that another one has cleaned up; and a
    database that has another store by now, whose objects have other names.
    """
    row = tx.one("find_location", payloads=location)
    if row is None or row.uuid != store:
        raise replaced()
    if row.instance is None:
        return
    if row.refused_at is not None or differ(row.instance, tx.instance()):
        raise not_of_this_database(location)


def differ(instance: str, other: str) -> bool:
    """Whether two databases are known to be different ones."""
    return any(
        one and two and one != two for one, two in zip(instance.split("/"), other.split("/"), strict=False)
    )


def require_same_store(tx: Transaction, store: str) -> None:
    """Refuse a database that has another store by now."""
    row = tx.one("read_store")
    if row is None or row.uuid != store:
        raise replaced()


def replaced() -> StoreNotFoundError:
    """Return the error for a store in whose place another one was created."""
    return StoreNotFoundError(
        "the store was removed while it was open, and there is another one in its place: restart this "
        "program or query, which opens that one",
        condition="STORE_NOT_FOUND.REPLACED",
    )


def of_nobody(location: str) -> StoreError:
    """Return the error for a location that does not say whose it is any more."""
    return StoreError(
        f"the location {location} does not say any more which database its objects belong to: somebody has "
        "deleted that there. If they belong to this one, run `penstock store clean-up --take-over`",
        condition="STORE_ERROR.OBJECTS_OF_A_COPY",
        storage=location,
    )


def not_of_this_database(location: str) -> StoreError:
    """Return the error for a location that belongs to another copy of the store."""
    return StoreError(
        f"the objects at {location} belong to another copy of this store, or to the one that this one was "
        "copied or restored from: this one may read them, and not write or delete any. If it is the one to "
        "keep, run `penstock store clean-up --take-over`; give a copy queues with locations of their own",
        condition="STORE_ERROR.OBJECTS_OF_A_COPY",
        storage=location,
    )
