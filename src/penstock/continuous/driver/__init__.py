"""The driver of a continuous query: its runs, epochs and checkpoint."""
