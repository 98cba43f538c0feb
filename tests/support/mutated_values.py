"""Random mutations of values and bytes."""

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


def mutate_bytes(rng: random.Random, data: bytes) -> bytes:
    """Mutate bytes in one to four places."""
    damaged = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        if not damaged:
            return rng.randbytes(8)
        position = rng.randrange(len(damaged))
        kind = rng.randrange(6)
        if kind == 0:
            damaged[position] ^= 1 << rng.randrange(8)
        elif kind == 1:
            damaged[position] = rng.randrange(256)
        elif kind == 2:
            position -= position % 4
            damaged[position : position + 4] = struct.pack("<q", rng.choice(INTEGERS))[:4]
        elif kind == 3:
            position -= position % 8
            damaged[position : position + 8] = struct.pack("<q", rng.choice(INTEGERS))
        elif kind == 4:
            del damaged[position : position + rng.choice((1, 4, 8, len(damaged)))]
        else:
            damaged[position:position] = damaged[:position][-rng.choice((4, 8, 64)) :]
    return bytes(damaged)


def mutate_value(rng: random.Random, old: object, kind: type) -> object:
    """Return another value for a column of bytes, texts, reals or integers, and sometimes None."""
    if rng.random() < 0.1:
        return None
    if isinstance(old, bytes) or kind is bytes:
        return mutate_bytes(rng, old) if isinstance(old, bytes) else rng.randbytes(20)
    if kind is str:
        if isinstance(old, str) and rng.random() < 0.3:
            return mutate_bytes(rng, old.encode()).decode(errors="replace")
        return rng.choice(TEXTS)
    return rng.choice(REALS if kind is float else INTEGERS)
