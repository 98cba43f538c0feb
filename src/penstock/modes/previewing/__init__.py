"""What a query emits in each output mode, tried on a few small micro-batches."""
