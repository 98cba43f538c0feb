"""Records of the store other than rows: queues, consumers, producers, owners, the ledger and queries."""
