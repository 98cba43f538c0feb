"""Which types of columns hold all values of others: a queue's column may get a wider type."""

from __future__ import annotations

import pyarrow as pa
import pyarrow.types as pat


def is_wider(now: pa.DataType, before: pa.DataType, *, key: bool = False) -> bool:
    """Return whether a type holds every value of another one of its kind, and more.

    Those are larger integers, floats and decimals. With ``key``, the values of both types also have one key
    hash: that of a decimal depends on its scale.
    """
    if pat.is_signed_integer(now) and pat.is_signed_integer(before):
        return bool(now.bit_width > before.bit_width)
    if pat.is_floating(now) and pat.is_floating(before):
        return bool(now.bit_width > before.bit_width)
    if not (pat.is_decimal(now) and pat.is_decimal(before)) or now == before:
        return False
    if now.precision - now.scale < before.precision - before.scale:
        return False
    return bool(now.scale == before.scale if key else now.scale >= before.scale)
