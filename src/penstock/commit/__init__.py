"""The exactly-once protocol: one transaction for the sink's rows, the consumer's offsets and the ledger
entry.
"""
