"""Everything that uses Spark's private API, which Spark may change without notice.

Supported are Spark 4.2 and 4.3; ``tests/spark/internals`` tests each module against both. Other packages get
plain Python values, DataFrames, and handles that they only pass back. `make lint` checks that private names
appear nowhere else.
"""
