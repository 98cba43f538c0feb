"""The exactly-once protocol: a sink's rows, the consumer's move and the ledger row are one transaction."""
