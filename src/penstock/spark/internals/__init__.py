"""The one room for Spark's private API: whatever Spark may change without notice is touched here and nowhere else.

Supported are Spark 4.2 and 4.3; ``tests/spark/internals`` holds each module against every one of them. Other rooms get plain Python
values, DataFrames, and handles that they only pass back. `make lint` looks for private names elsewhere.
"""
