"""Delta, Iceberg and Parquet tables: locations, storage access and reading of Parquet files."""
