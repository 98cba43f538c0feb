"""The tasks of a continuous query, and their channel to the driver."""
