"""Parsing and formatting of counts, sizes and durations."""

from __future__ import annotations

import re
from datetime import timedelta
from decimal import Decimal

from penstock.arguments import did_you_mean, in_quotes
from penstock.errors import InvalidInputError

_COUNTS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}
_SIZES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SECONDS = {
    "w": Decimal(604_800),
    "d": Decimal(86_400),
    "h": Decimal(3_600),
    "m": Decimal(60),
    "min": Decimal(60),
    "s": Decimal(1),
    "ms": Decimal("0.001"),
}

_NUMBER = r"(\d[\d_]*(?:\.\d+)?)"
_QUANTITY = re.compile(rf"{_NUMBER}\s*([A-Za-z]*)")
_PARTS = re.compile(rf"(?:{_NUMBER}\s*([A-Za-z]+)\s*)+")
_PART = re.compile(rf"{_NUMBER}\s*([A-Za-z]+)")


def parse_count(text: str, option: str) -> int:
    """Parse the count in the value of an option: ``1000``, ``1_000``, ``10k``, ``1.5M``."""
    return _quantity(text, option, _COUNTS, "a whole number such as 5000, 10k or 1M")


def parse_size(text: str, option: str) -> int:
    """Parse the number of bytes in the value of an option: ``1000``, ``512KiB``, ``10GB``."""
    return _quantity(text, option, _SIZES, "a size such as 1000000, 512MiB or 10GB")


def _quantity(text: str, option: str, units: dict[str, int], expected: str) -> int:
    match = _QUANTITY.fullmatch(text.strip())
    unit = units.get(match[2].lower()) if match else None
    if match is None or unit is None:
        hint = did_you_mean(match[2], units) if match and match[2] else ""
        raise InvalidInputError(f"{option} is {expected}, not {in_quotes(text)}.{hint}", value=text)
    amount = Decimal(match[1]) * unit
    if amount != int(amount):
        raise InvalidInputError(
            f"{option} is {expected}, and {in_quotes(text)} is not a whole number", value=text
        )
    return int(amount)


def parse_age(text: str, option: str) -> timedelta:
    """Parse the duration in the value of an option: ``7d``, ``12h``, ``90 min``, ``1d12h``."""
    if _PARTS.fullmatch(text.strip()):
        parts = [(Decimal(number), _SECONDS.get(unit.lower())) for number, unit in _PART.findall(text)]
        seconds = sum((number * unit for number, unit in parts if unit is not None), Decimal(0))
        if all(unit is not None for _, unit in parts) and seconds <= 86_400 * 999_999:
            return timedelta(seconds=int(seconds), microseconds=int(seconds % 1 * 1_000_000))
    raise InvalidInputError(
        f"{option} is a duration such as 7d, 12h, 90min or 30s, not {in_quotes(text)}", value=text
    )


def count_text(count: int) -> str:
    return f"{count:,}"


def counted(count: int, noun: str) -> str:
    """Return ``1 row`` or ``1,234 rows``."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"


def size_text(size: int) -> str:
    """Format a number of bytes with at most three digits: ``12.3 MB``."""
    amount = float(size)
    for unit in ("B", "kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.0f} {unit}" if unit == "B" or amount >= 99.95 else f"{amount:.1f} {unit}"
        amount /= 1000
    return f"{amount:,.1f} TB"


def age_text(age: timedelta | float) -> str:
    """Format a duration in its two largest units: ``2 d 3 h``."""
    seconds = age.total_seconds() if isinstance(age, timedelta) else age
    if seconds < 60:
        return f"{seconds:.3g} s"
    remaining, parts = int(seconds), []
    for unit, size in (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1)):
        if remaining >= size:
            parts.append(f"{remaining // size} {unit}")
            remaining %= size
    return " ".join(parts[:2])
