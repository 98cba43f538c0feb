"""Faults in the handling of objects that hold the rows of queues."""

from __future__ import annotations

from tests.simulation.faults.fault import Fault

OBJECTS = [
    Fault(
        "objects whose upload began long ago are added to the store",
        "store/log/payloads.py",
        "    if any(not earliest <= row.created_at <= latest for row in recorded):\n",
        "    if False:\n",
    ),
    Fault(
        "old objects are deleted even if the store refers to them",
        "store/log/object_cleaning.py",
        "    return [stored_object for stored_object in old_enough if stored_object.name not in names]\n",
        "    return old_enough\n",
    ),
    Fault(
        "objects without payloads are deleted immediately",
        "store/log/object_cleaning.py",
        """        return tx.all("delete_unused", queue_id=folder.queue_id, before=before, most=OBJECTS_PER_STATEMENT)""",
        """        return tx.all("delete_unused", queue_id=folder.queue_id, before=tx.now(), most=OBJECTS_PER_STATEMENT)""",
    ),
    Fault(
        "only the first object of an append is added to the store",
        "store/log/payloads.py",
        "    new_objects = list({new_object.object_id: new_object for new_object in objects}.values())\n",
        "    new_objects = list({new_object.object_id: new_object for new_object in objects}.values())[:1]\n",
    ),
]
