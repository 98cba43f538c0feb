"""``Findings``: differences counted by range, and the first rows that differ."""

from __future__ import annotations

import bisect
from collections import Counter
from collections.abc import Mapping, Sequence
from decimal import Decimal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from penstock.reconciliation.copies import Copy
from penstock.reconciliation.report import DIFFERENT, EXTRA, MISSING, DifferingRange, DifferingRow
from penstock.reconciliation.rows import ABSENT, INVALID, HashedRows, Key, key_table, keys_of, without_nan
from penstock.reconciliation.scanning import Scan
from penstock.reconciliation.settling import Observation
from penstock.reconciliation.source import NUMERIC, SourceTable

_HASH_RANGES_BITS = 10
"""A range of hashes has 1,024 of the 65,536 buckets."""
_MAX_ROWS = 100


class Findings:
    """Collector of rows that differ; keeps up to ``max_rows`` of them for the report."""

    def __init__(self, source: SourceTable, copy: Copy, scan: Scan, max_rows: int) -> None:
        self._source, self._copy, self._scan, self._max_rows = source, copy, scan, max_rows
        self.kinds: Counter[str] = Counter()
        self.rows: list[DifferingRow] = []
        self._counts: Counter[tuple[int, str]] = Counter()

    def add(self, observations: Mapping[Key, Observation]) -> None:
        """Add rows that differ."""
        kinds = {key: _kind(sighting) for key, sighting in observations.items()}
        self.kinds.update(kinds.values())
        self._counts.update(zip(self._range_numbers(list(kinds)), kinds.values(), strict=True))
        remaining = self._max_rows - len(self.rows)
        for first in range(0, min(remaining, len(kinds)), _MAX_ROWS):
            part = list(kinds)[first : min(remaining, first + _MAX_ROWS)]
            self.rows += self._describe(part, kinds)

    def _range_numbers(self, keys: Sequence[Key]) -> list[int]:
        if self._source.is_ordered:
            # The bound of a range is added after its rows are reported. Until then it is the last range.
            bounds = [self._comparable(key) for key in self._scan.bounds]
            return [bisect.bisect_left(bounds, self._comparable(key)) for key in keys]
        table = key_table(self._key_schema, keys)
        buckets = HashedRows(table, np.zeros(len(keys), np.uint64)).buckets
        numbers: list[int] = (buckets >> _HASH_RANGES_BITS).tolist()
        return numbers

    def _comparable(self, key: Key) -> tuple[object, ...]:
        """Return a form of a key that Python sorts as the databases do."""
        kinds = self._source.key_types
        return tuple(
            _sort_value(value, kinds[name]) for name, value in zip(self._source.key, key, strict=True)
        )

    @property
    def _key_schema(self) -> pa.Schema:
        return pa.schema([self._source.schema.field(name) for name in self._source.key])

    def _describe(self, keys: Sequence[Key], kinds: Mapping[Key, str]) -> list[DifferingRow]:
        changed = [key for key in keys if kinds[key] == DIFFERENT]
        columns = self._differing_columns(changed) if changed else {}
        names = self._source.key
        return [
            DifferingRow(dict(zip(names, key, strict=True)), kinds[key], tuple(columns.get(key, ())))
            for key in keys
        ]

    def _differing_columns(self, keys: Sequence[Key]) -> dict[Key, list[str]]:
        source = pa.concat_tables([part.rows for part in self._source.find(keys)])
        if self._copy.nan_as_null:
            source = without_nan(source)
        copy = pa.concat_tables(list(self._copy.find(keys)))
        source_indexes, copy_indexes = (
            dict(zip(keys_of(rows.select(list(self._source.key))), range(rows.num_rows), strict=True))
            for rows in (source, copy)
        )
        common = [key for key in keys if key in source_indexes and key in copy_indexes]
        source = source.take([source_indexes[key] for key in common])
        copy = copy.take([copy_indexes[key] for key in common])
        differing: dict[Key, list[str]] = {key: [] for key in common}
        for name in self._source.schema.names:
            differs = _differs(source[name], copy[name])
            for key, is_different, invalid in zip(
                common, differs.to_pylist(), copy[INVALID].to_pylist(), strict=True
            ):
                if is_different or (invalid is not None and f"\0{name}\0" in f"\0{invalid}"):
                    differing[key].append(name)
        return differing

    def ranges(self) -> tuple[DifferingRange, ...]:
        """Return the ranges with differences, in order."""
        return tuple(map(self._range, sorted({number for number, _ in self._counts})))

    def _range(self, number: int) -> DifferingRange:
        counts = (self._counts[number, kind] for kind in (MISSING, EXTRA, DIFFERENT))
        if not self._source.is_ordered:
            return DifferingRange(number, None, None, *counts)
        return DifferingRange(number, self._bound(number - 1), self._bound(number), *counts)

    def _bound(self, number: int) -> dict[str, object] | None:
        bounds = self._scan.bounds
        inside = 0 <= number < len(bounds)
        return dict(zip(self._source.key, bounds[number], strict=True)) if inside else None


def _kind(sighting: Observation) -> str:
    if sighting.copy == ABSENT:
        return MISSING
    return EXTRA if sighting.source == ABSENT else DIFFERENT


def _differs(source: pa.ChunkedArray, copy: pa.ChunkedArray) -> pa.ChunkedArray:
    same = pc.fill_null(pc.equal(source, copy), False)
    both_null = pc.and_(pc.is_null(source), pc.is_null(copy))
    same = pc.or_(same, both_null)
    if pa.types.is_floating(source.type):
        both_nan = pc.and_(pc.fill_null(pc.is_nan(source), False), pc.fill_null(pc.is_nan(copy), False))
        same = pc.or_(same, both_nan)
    return pc.invert(same)


def _sort_value(value: object, kind: int) -> object:
    """Return a value that Python sorts as the databases do: text by UTF-8 bytes, numeric by value."""
    if not isinstance(value, str):
        return value
    return _numeric_order(value) if kind == NUMERIC else value.encode()


def _numeric_order(text: str) -> tuple[int, Decimal]:
    """Return the sort value of a numeric in text; NaN sorts after numbers, and invalid text after NaN."""
    try:
        number = Decimal(text)
    except ArithmeticError:
        return 2, Decimal(0)
    return (1, Decimal(0)) if number.is_nan() else (0, number)
