"""One pipeline: source, transform, sink, any trigger, checked before it starts."""
