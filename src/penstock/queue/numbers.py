"""Whether a number that names a row or a partition is a whole one."""

from __future__ import annotations

from penstock.errors import InvalidInput, InvalidPosition


def check_whole_partition(partition: object) -> None:
    """Refuse what is no whole number; True is none either.

    Raises
    ------
    InvalidInput
    """
    if type(partition) is not int:
        raise InvalidInput(f"a partition is a whole number, not {partition!r}")


def check_whole_index(*indexes: object) -> None:
    """Refuse row indexes that are no whole numbers.

    Raises
    ------
    InvalidPosition
    """
    for index in indexes:
        if type(index) is not int:
            raise InvalidPosition(f"a row index is a whole number, not {index!r}")
