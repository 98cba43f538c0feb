"""Decimals as Debezium writes them."""

from __future__ import annotations

import base64


def to_base64(number: int) -> str:
    """As Java's BigInteger gives its bytes."""
    size = (number + (number < 0)).bit_length() // 8 + 1
    return base64.b64encode(number.to_bytes(size, "big", signed=True)).decode()
