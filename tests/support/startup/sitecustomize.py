"""Run by every Python process of the tests when it starts."""

from tests.support.starting import start

start()
