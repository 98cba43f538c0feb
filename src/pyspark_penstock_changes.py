"""Spark finds the data source ``penstock_changes`` through this module, as it finds ``penstock``."""

from penstock.changes.data_source import ChangesDataSource as DefaultSource

__all__ = ["DefaultSource"]
