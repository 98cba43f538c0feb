"""A demonstration: a year of flights as a change feed, streamed exactly once. Run it with ``make demo``."""


class DemoError(RuntimeError):
    """The demo cannot run, or one of its processes failed."""
