"""Values and bytes that somebody could put in the place of others."""

from __future__ import annotations

import random
import struct

INTEGERS = (0, 1, -1, 2, 127, 128, 2**16, 2**24, 2**30, 2**31 - 1, -(2**31), 2**32, 2**40, 2**53 + 1,
            2**62, 2**63 - 1, -(2**63))  # fmt: skip
TEXTS = (
    "", "x", "[" * 100_000, "{}", "[]", "[[1, 2]]", "5", "null", '"x"', '{"a": Infinity}', '{"a": 1e999}',
    '{"a": NaN}', '{"a": [1]}', '{"a": -1}', "x" * 100_000, "\0", "é", "http://[::1", "penstock", "running",
    "[99999999999]",
)  # fmt: skip
REALS = (0.0, -1.0, float("nan"), float("inf"), float("-inf"), 1e308, 5e-324)


def mutated(source: random.Random, data: bytes) -> bytes:
    """Change one to four places of some bytes."""
    damaged = bytearray(data)
    for _ in range(source.randint(1, 4)):
        if not damaged:
            return source.randbytes(8)
        place = source.randrange(len(damaged))
        kind = source.randrange(6)
        if kind == 0:
            damaged[place] ^= 1 << source.randrange(8)
        elif kind == 1:
            damaged[place] = source.randrange(256)
        elif kind == 2:
            place -= place % 4
            damaged[place : place + 4] = struct.pack("<q", source.choice(INTEGERS))[:4]
        elif kind == 3:
            place -= place % 8
            damaged[place : place + 8] = struct.pack("<q", source.choice(INTEGERS))
        elif kind == 4:
            del damaged[place : place + source.choice((1, 4, 8, len(damaged)))]
        else:
            damaged[place:place] = damaged[:place][-source.choice((4, 8, 64)) :]
    return bytes(damaged)


def mutated_value(source: random.Random, old: object, kind: type) -> object:
    """Return another value for a column of bytes, texts, reals or integers; sometimes none."""
    if source.random() < 0.1:
        return None
    if isinstance(old, bytes) or kind is bytes:
        return mutated(source, old) if isinstance(old, bytes) else source.randbytes(20)
    if kind is str:
        if isinstance(old, str) and source.random() < 0.3:
            return mutated(source, old.encode()).decode(errors="replace")
        return source.choice(TEXTS)
    return source.choice(REALS if kind is float else INTEGERS)
