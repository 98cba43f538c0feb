"""Every Python process of the tests runs this as it starts."""

from tests.support.unzipped import prefer_installed

prefer_installed()
