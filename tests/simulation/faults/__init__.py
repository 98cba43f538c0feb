"""Faults that somebody could bring into the protocol, each of which the simulation has to find.

A fault is a text that occurs once in a file of ``src/penstock``, and what stands in its place: a missing
check, a swapped order, a lost lock, an ignored epoch. Each breaks a promise in some schedule. Where another
check would make it harmless, that one is left out as well, and the fault has to break more than that.
``python -m tests.simulation.fault_run`` applies them one by one.
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
