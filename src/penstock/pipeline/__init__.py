"""Pipelines of a source, transformations and a sink, with any trigger; checked before they start."""
