"""Deterministic simulation of the protocols of both engines.

The real protocol code runs in simulated processes, in virtual time, while a seed decides the order of their
steps and the faults. An auditor that does not depend on the code checks the results.

- ``scheduler``: processes, tasks, virtual time, and the choices of a seed
- ``machine``: the disk, network, object storage and database servers that the processes share
- ``patches``, ``threads``: replacements that make the real code run on the machine
- ``server``, ``database``, ``locks``: a store's database, with isolation and locks of SQLite or PostgreSQL
- ``disk``, ``objects``, ``network``: checkpoint files, object storage, and sockets
- ``query``, ``micro_batch``, ``continuous``: the query, and models of Spark's engines that run it
- ``scenario``, ``clients``, ``operator``: the initial state, the clients, and the operator of the query
- ``moves``, ``data_moves``: the faults and operations that a schedule injects
- ``snapshots``: what readers can read at one moment, for the auditor
- ``schedules``: running, shrinking and reporting a schedule
- ``faults``, ``fault_run``: changes of the code that the simulation must detect
- ``tests.support.auditor``: the invariants
"""
