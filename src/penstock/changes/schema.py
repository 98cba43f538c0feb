"""Location and checks of a contract's columns in the schema of a DataFrame."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from pyspark.sql.types import (
    ArrayType,
    CalendarIntervalType,
    DataType,
    LongType,
    MapType,
    StringType,
    StructType,
    TimestampType,
    YearMonthIntervalType,
)

from penstock.arguments import did_you_mean, in_quotes
from penstock.changes.passes.rows import Layout, Path
from penstock.errors import InvalidChangelogSchemaError
from penstock.feeds.contract import (
    CHANGE_TYPE,
    COMMIT_TIMESTAMP,
    COMMIT_VERSION,
    ChangeContract,
    invalid_schema,
)
from penstock.spark.schemas import with_feed_metadata

HELPER_PREFIXES = ("__penstock_", "__spark_cdc_")
"""Prefixes of the names of helper columns."""
_PARTS = re.compile(r"`((?:[^`]|``)+)`|([^.`]+)")
_NOT_GROUPABLE = ("map", "variant", "geometry", "geography")
"""Types that Spark does not group by, or cannot shuffle by (geometry and geography from Spark 4.1 on)."""
_TYPES: dict[str, tuple[type[DataType], ...]] = {
    CHANGE_TYPE: (StringType,),
    COMMIT_VERSION: (LongType, StringType),
    COMMIT_TIMESTAMP: (TimestampType,),
}


def layout_of(schema: StructType, contract: ChangeContract, *, case_sensitive: bool) -> Layout:
    """Locate the contract's columns in a feed's schema; a dot in a name separates the fields of structs."""
    finder = _ColumnFinder(schema, case_sensitive)
    metadata = {name: finder.top_level(name) for name in _TYPES}
    for name, place in metadata.items():
        kind, wanted = schema.fields[place].dataType, _TYPES[name]
        if not isinstance(kind, wanted):
            names = " or ".join(type_().simpleString() for type_ in wanted)
            raise _wrong_type("column", name, kind, f"not {names}: cast it")
    row_id = tuple(finder.path(name) for name in contract.row_id)
    _check_binary_text("column", COMMIT_VERSION, schema.fields[metadata[COMMIT_VERSION]].dataType)
    for name, path in zip(contract.row_id, row_id, strict=True):
        _check_groupable(name, type_at(schema, path))
    reserved = next((name for name in schema.names if name.lower().startswith(HELPER_PREFIXES)), None)
    if reserved is not None:
        raise invalid_schema(
            "RESERVED_COLUMN",
            reserved,
            f"the column {in_quotes(reserved)} has a name that is reserved for helper columns: rename it",
        )
    sequence = finder.path(contract.sequence) if contract.sequence is not None else None
    if sequence is not None:
        _check_binary_text("sequence", str(contract.sequence), type_at(schema, sequence))
    if sequence is not None and len(sequence) > 1 and contract.carryover_rows:
        raise invalid_schema(
            "INVALID_COLUMN_TYPE",
            str(contract.sequence),
            f"the sequence {in_quotes(contract.sequence)} is a field of a struct, and structs are "
            "compared to find carry-over rows: move it to a top-level column",
        )
    unchanged = (finder.top_level(contract.unchanged),) if contract.unchanged is not None else None
    if unchanged is not None:
        kind = schema.fields[unchanged[0]].dataType
        if not isinstance(kind, ArrayType) or not isinstance(kind.elementType, StringType):
            name = str(contract.unchanged)
            raise _wrong_type("column", name, kind, "not array<string> of column names: cast it")
    others = {*metadata.values(), *(sequence if sequence is not None and len(sequence) == 1 else ())}
    data = tuple((place,) for place in range(len(schema.fields)) if place not in others)
    return Layout(
        change_type=metadata[CHANGE_TYPE],
        version=metadata[COMMIT_VERSION],
        timestamp=metadata[COMMIT_TIMESTAMP],
        row_id=row_id,
        data=data,
        row_version=finder.path(contract.row_version) if contract.row_version is not None else None,
        sequence=sequence,
        nullable_row_id=contract.nullable_row_id,
        unchanged=unchanged,
        keyless=contract.nullable_row_id and all(path in (*row_id, unchanged) for path in data),
        repeats=contract.repeated_changes,
    )


def check_arrow_types(schema: StructType) -> None:
    """Refuse columns that Spark cannot pass to the tasks of the passes."""
    for field in schema:
        if _has_months(field.dataType):
            why = "which Spark cannot pass to Python: cast it to a string, or to an integer number of months"
            raise _wrong_type("column", field.name, field.dataType, why)


def _has_months(kind: DataType) -> bool:
    if isinstance(kind, StructType):
        return any(_has_months(field.dataType) for field in kind)
    if isinstance(kind, MapType):
        return _has_months(kind.keyType) or _has_months(kind.valueType)
    if isinstance(kind, ArrayType):
        return _has_months(kind.elementType)
    return isinstance(kind, YearMonthIntervalType | CalendarIntervalType)


def select_columns(
    schema: StructType, contract: ChangeContract | None, columns: Sequence[str], *, case_sensitive: bool
) -> StructType:
    """Return the requested columns and those that the passes need, in the schema's order."""
    finder = _ColumnFinder(schema, case_sensitive)
    places = {finder.top_level(name) for name in (*columns, *_TYPES)}
    if contract is not None:
        layout = layout_of(schema, contract, case_sensitive=case_sensitive)
        paths = [*layout.row_id, layout.row_version, layout.sequence, layout.unchanged]
        # Rows are compared by the row version, or by all data columns.
        compared = contract.carryover_rows or (contract.intermediate_changes and contract.sequence is None)
        paths += layout.content if compared else ()
        places |= {path[0] for path in paths if path is not None}
    return StructType([schema.fields[place] for place in sorted(places)])


def with_contract_metadata(schema: StructType, contract: ChangeContract, *, net: bool) -> StructType:
    """Add the contract to the metadata of columns, so that sinks find it even after a selection.

    With net changes (``net``), a commit has at most one change of each row.
    """
    return with_feed_metadata(
        schema,
        contract.row_id,
        unchanged=contract.unchanged,
        sequence=contract.sequence,
        ordered=CHANGE_TYPE if contract.intermediate_changes and not net else None,
    )


def type_at(schema: StructType, path: Path) -> DataType:
    """Return the type of a column, at any depth of structs."""
    kind: DataType = schema
    for index in path:
        assert isinstance(kind, StructType)
        kind = kind.fields[index].dataType
    return kind


class _ColumnFinder:
    """Finder of columns by name, with the case sensitivity of the session."""

    def __init__(self, schema: StructType, case_sensitive: bool) -> None:
        self._schema = schema
        self._fold_case: Callable[[str], str] = str if case_sensitive else str.lower

    def top_level(self, name: str) -> int:
        return self._place(self._schema, name, name)

    def path(self, name: str) -> Path:
        if name in self._schema.names:
            return (self._schema.names.index(name),)
        parts = [quoted.replace("``", "`") or plain for quoted, plain in _PARTS.findall(name)]
        path: list[int] = []
        struct: DataType = self._schema
        for part in parts:
            if not isinstance(struct, StructType):
                raise invalid_schema(
                    "MISSING_COLUMN",
                    name,
                    f"there is no column {in_quotes(name)}: the part before {in_quotes(part)} is not a "
                    "struct",
                )
            path.append(self._place(struct, part, name))
            struct = struct.fields[path[-1]].dataType
        return tuple(path)

    def _place(self, struct: StructType, name: str, full_name: str) -> int:
        fold_case = self._fold_case
        places = [place for place, column in enumerate(struct.names) if fold_case(column) == fold_case(name)]
        if not places:
            hint = did_you_mean(name, struct.names)
            raise invalid_schema(
                "MISSING_COLUMN",
                full_name,
                f"there is no column {in_quotes(full_name)}; the columns are {_listed(struct.names)}.{hint}",
            )
        if len(places) > 1:
            raise invalid_schema(
                "AMBIGUOUS_COLUMN",
                full_name,
                f"several columns are named {in_quotes(full_name)}, ignoring case: rename one",
            )
        return places[0]


def _wrong_type(what: str, name: str, kind: DataType, why: str) -> InvalidChangelogSchemaError:
    return invalid_schema(
        "INVALID_COLUMN_TYPE", name, f"the {what} {in_quotes(name)} is {kind.simpleString()}, {why}"
    )


def _check_groupable(name: str, kind: DataType) -> None:
    if kind.typeName() in _NOT_GROUPABLE:
        raise _wrong_type("row id", name, kind, "which Spark cannot group by: use other columns")
    _check_binary_text("row id", name, kind)
    for inner in kind.fields if isinstance(kind, StructType) else ():
        _check_groupable(f"{name}.{inner.name}", inner.dataType)
    if isinstance(kind, ArrayType):
        _check_groupable(f"{name}.element", kind.elementType)


def _check_binary_text(what: str, name: str, kind: DataType) -> None:
    """Refuse text with a collation, because the passes compare and sort text by its bytes."""
    if isinstance(kind, StringType) and kind.collation != StringType().collation:
        why = f"so that different texts may be equal: compute a column from it, such as lower({name})"
        raise _wrong_type(what, name, kind, f"{why}, and cast it to string")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:20]) + (", …" if len(names) > 20 else "")
