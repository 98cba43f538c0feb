"""Faults of the objects that hold the rows of queues."""

from __future__ import annotations

from tests.simulation.faults.fault import Fault

OBJECTS = [
    Fault(
        "objects that were begun long ago are entered",
        "store/log/payloads.py",
        "    if any(not earliest <= row.created_at <= latest for row in entered):\n",
        "    if False:\n",
    ),
    Fault(
        "old objects are deleted whether the store has them or not",
        "store/log/object_cleaning.py",
        "    return [each for each in old if each.name not in names]\n",
        "    return old\n",
    ),
    Fault(
        "objects without payloads are deleted at once",
        "store/log/object_cleaning.py",
        """        return tx.all("delete_unused", queue_id=folder.queue_id, before=before, most=AT_ONCE)""",
        """        return tx.all("delete_unused", queue_id=folder.queue_id, before=tx.now(), most=AT_ONCE)""",
    ),
    Fault(
        "only the first object of an append is entered",
        "store/log/payloads.py",
        "    made = list({each.object_id: each for each in objects}.values())\n",
        "    made = list({each.object_id: each for each in objects}.values())[:1]\n",
    ),
]
