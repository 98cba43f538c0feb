"""Arrow as Spark speaks it: schemas, rows, key hashes and stored segments. Nothing here imports Spark."""
