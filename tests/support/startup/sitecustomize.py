"""Every Python process of the tests runs this as it starts."""

from tests.support.starting import start

start()
