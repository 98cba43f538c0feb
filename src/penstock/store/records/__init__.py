"""Records of the store, apart from rows: queues, consumers, producers, owners, pumps, the ledger and
queries.
"""
