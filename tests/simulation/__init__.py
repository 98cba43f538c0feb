"""The protocols of both engines under a seeded scheduler, with virtual time.

An auditor that knows none of the code judges them.

``scheduler``   simulated processes that take turns, and the choices that a seed makes
``virtual``     time, threads, identifiers and other things that the code takes from the machine
``database``    a store's database: SQL by SQLite, isolation and locks as SQLite or PostgreSQL have them
``disk``        the files of checkpoints
``network``     the sockets between a continuous query's driver and its tasks
``micro_batch`` and ``continuous``  what Spark does around the code
``scenario``, ``clients``, ``operator``  what is run, and what is done to it
``auditor``     what must hold
``schedules``   one schedule from a seed, the shortest one that fails the same way, and many of them
"""
