"""What appending needs to know about a schema, worked out once for each schema object."""

from __future__ import annotations

import weakref
from dataclasses import dataclass

import pyarrow as pa

from penstock.arrow.nulls import forbids_nulls
from penstock.arrow.pyvalues import Coder, coder_of


@dataclass(frozen=True, slots=True)
class Column:
    """One column of the schema.

    Parameters
    ----------
    name, type
        As in the schema.
    field
        The schema's field.
    required
        Whether it takes no nulls.
    required_below
        Whether something in its nested values takes no nulls.
    coder
        Brings Python values into what Arrow converts without loss.
    """

    name: str
    type: pa.DataType
    field: pa.Field
    required: bool
    required_below: bool
    coder: Coder


@dataclass(frozen=True, slots=True)
class Plan:
    """A schema and what was worked out from it."""

    columns: tuple[Column, ...]
    fields: tuple[pa.Field, ...]
    names: frozenset[str]
    guarded: tuple[tuple[int, Column], ...]


# By identity: a queue keeps one schema object, and hashing a schema costs more than appending a row.
_plans: dict[int, tuple[weakref.ref[pa.Schema], Plan]] = {}


def plan_of(schema: pa.Schema) -> Plan:
    """Return the plan of a canonical schema, from memory when this very object was seen before."""
    known = _plans.get(id(schema))
    if known is not None and known[0]() is schema:
        return known[1]
    plan = _plan(schema)
    key = id(schema)
    _plans[key] = (weakref.ref(schema, lambda _: _plans.pop(key, None)), plan)
    return plan


def _plan(schema: pa.Schema) -> Plan:
    columns = tuple(
        Column(
            name=field.name,
            type=field.type,
            field=field,
            required=not field.nullable,
            required_below=forbids_nulls(field, below_only=True),
            coder=coder_of(field.type, field.name),
        )
        for field in schema
    )
    guarded = tuple((i, each) for i, each in enumerate(columns) if each.required or each.required_below)
    return Plan(columns, tuple(schema), frozenset(schema.names), guarded)
