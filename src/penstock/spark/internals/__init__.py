"""All uses of Spark's private API, which Spark may change without notice.

Spark 4.2 and 4.3 are supported, and ``tests/spark/internals`` tests each module with both. Other packages get
plain Python values, DataFrames, and handles that they only pass back. `make lint` checks that private names
are not used anywhere else.
"""
