"""The exactly-once protocol: one transaction for a sink's rows, the consumer's move and the ledger row."""
