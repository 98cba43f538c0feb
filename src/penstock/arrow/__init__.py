"""Arrow in the form that Spark uses: schemas, rows, key hashes and stored segments. Does not import Spark."""
