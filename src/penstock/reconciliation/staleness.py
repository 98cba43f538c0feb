"""Which rows of the copy are not as in the source, at the moment of a repair."""

from __future__ import annotations

from collections.abc import Sequence

import pyarrow as pa

from penstock.reconciliation.rows import ABSENT, Key, prints


def stale_keys(source: pa.Table, copy: pa.Table, key: Sequence[str]) -> list[Key]:
    """Return the keys whose rows differ."""
    wanted, found = prints([source], key), prints([copy], key)
    return [each for each in {**wanted, **found} if wanted.get(each, ABSENT) != found.get(each, ABSENT)]
