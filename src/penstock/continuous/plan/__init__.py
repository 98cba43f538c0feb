"""What a continuous query takes of Spark's plans, and how its DataFrame is built."""
