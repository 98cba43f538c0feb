"""Faults in the protocol code that the simulation must detect.

A fault replaces a text that occurs once in a file of ``src/penstock``. It omits a check, swaps an order, drops a
lock or ignores an epoch, for example, and violates a guarantee in some schedules. If another check would mask
the fault, a baseline change removes that check, and only schedules that pass with the baseline count.
``python -m tests.simulation.fault_run`` applies the faults one by one.
"""

from __future__ import annotations

from tests.simulation.faults.commits import COMMITS
from tests.simulation.faults.continuous import CONTINUOUS
from tests.simulation.faults.micro_batches import MICRO_BATCHES
from tests.simulation.faults.objects import OBJECTS
from tests.simulation.faults.owners import OWNERS
from tests.simulation.faults.queues import QUEUES
from tests.simulation.faults.tables import TABLES

FAULTS = [*COMMITS, *OWNERS, *CONTINUOUS, *MICRO_BATCHES, *QUEUES, *OBJECTS, *TABLES]
