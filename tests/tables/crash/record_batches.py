"""Changes in micro-batches, whose rows would be others with a record that does not match them."""

from __future__ import annotations

from tests.tables.histories import Event

BATCHES: list[list[Event]] = [
    [
        *((f"k{number}", number, 10, 1) for number in range(20)),
        ("gone", 0, 12, 0),
        ("kept", 1, 12, 1),
        ("late", 2, 11, 1),
    ],
    [
        # They change stored rows, delete some, come again and come late.
        *((f"k{number}", 100 + number, 20, 1) for number in range(4)),
        *((f"k{number}", 0, 20, 0) for number in range(4, 7)),
        ("gone", 3, 11, 1),
        ("gone", 4, 21, 1),
        ("late", 5, 9, 1),
        ("k8", 6, 9, 0),
        ("kept", 1, 12, 1),
    ],
    # Only what is recorded changes.
    [("never", 0, 30, 0), ("k9", 0, 5, 0), ("k4", 7, 25, 0)],
    [
        ("never", 8, 29, 1),
        ("k4", 9, 40, 1),
        ("k4", 12, 24, 1),
        ("k5", 10, 19, 1),
        ("k0", 0, 41, 0),
        ("new", 11, 41, 1),
    ],
]
OTHERS: list[Event] = [
    *(("other", 1, 5, 1), ("k1", 1000, 15, 1), ("k2", 2000, 25, 1), ("k3", 0, 35, 0)),
    # Until the second micro-batch is applied, no delete ends it.
    ("k5", 3000, 15, 1),
]
"""Those of another query, each a micro-batch, after the second one of `BATCHES` was recorded in vain."""
