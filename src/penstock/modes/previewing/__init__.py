"""Preview of output modes over a few small micro-batches."""
