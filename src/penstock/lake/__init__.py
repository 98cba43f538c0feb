"""Tables in files: where they lie, and how Delta, Iceberg and Parquet files are read."""
