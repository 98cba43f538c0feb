"""Locations of objects, and the database that each location belongs to.

A copy of a store refers to the same objects as the original. Both may read them. But neither knows which
objects the other needs, so only one of the two may write and delete objects.
"""

from __future__ import annotations

from penstock.errors import StoreError, StoreNotFoundError
from penstock.store.database import Transaction


def record_location(tx: Transaction, location: str, cleaned_at: int) -> None:
    """Record that a location belongs to this database, unless the store has a record of it already."""
    tx.run("insert_location", payloads=location, now=cleaned_at, instance=tx.instance())


def require_own_location(tx: Transaction, store: str, location: str) -> None:
    """Refuse a location that belongs to another copy of the store or that another copy has cleaned up.

    Also refuse a database in which another store has replaced this one, since that store's objects have other
    names.
    """
    row = tx.one("find_location", payloads=location)
    if row is None or row.uuid != store:
        raise store_replaced_error()
    if row.instance is None:
        return
    if row.refused_at is not None or are_different_databases(row.instance, tx.instance()):
        raise other_owner_error(location)


def are_different_databases(instance: str, other: str) -> bool:
    """Return whether two databases are certainly different."""
    return any(
        one and two and one != two for one, two in zip(instance.split("/"), other.split("/"), strict=False)
    )


def require_same_store(tx: Transaction, store: str) -> None:
    """Refuse a database in which another store has replaced this one."""
    row = tx.one("read_store")
    if row is None or row.uuid != store:
        raise store_replaced_error()


def store_replaced_error() -> StoreNotFoundError:
    """Return the error for a store that has been replaced by another one."""
    return StoreNotFoundError(
        "the store was removed while it was open, and another store has taken its place: restart this "
        "program or query, which then opens the new store",
        condition="STORE_NOT_FOUND.REPLACED",
    )


def owner_unknown_error(location: str) -> StoreError:
    """Return the error for a location at which the record of its owner is missing."""
    return StoreError(
        f"the record of which database owns the objects at {location} was deleted there. If this store is "
        "the one to keep, run `penstock store clean-up --take-over`",
        condition="STORE_ERROR.OBJECTS_OF_A_COPY",
        storage=location,
    )


def other_owner_error(location: str) -> StoreError:
    """Return the error for a location that belongs to another copy of the store."""
    return StoreError(
        f"the objects at {location} belong to another copy of this store, or to the store from which it was "
        "copied or restored. This store may read them, but not write or delete any. If it is the one to "
        "keep, run `penstock store clean-up --take-over`. If not, give its queues their own locations",
        condition="STORE_ERROR.OBJECTS_OF_A_COPY",
        storage=location,
    )
