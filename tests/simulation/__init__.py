"""Deterministic simulation of the protocols of both engines.

The real protocol code runs in simulated processes, in virtual time, while a seed decides the order of their
steps and the faults. An auditor that does not depend on the code checks the results.

``scheduler``                   processes, tasks, virtual time, and the choices of a seed
``virtual``, ``threads``        the simulated machine, and the patches that make the code run on it
``server``, ``database``, ``locks``  a store's database, with the isolation and locks of SQLite or PostgreSQL
``disk``, ``objects``, ``network``   checkpoint files, object storage, and sockets
``micro_batch``, ``continuous`` models of Spark's engines
``scenario``, ``clients``, ``operator``  the initial state, the clients, and the operator of the query
``moves``, ``data_moves``       faults and operations that a schedule injects
``schedules``                   running, shrinking and reporting a schedule
``faults``, ``fault_run``       changes of the code that the simulation must detect
``tests.support.auditor``       the invariants
"""
