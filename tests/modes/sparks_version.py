"""What differs between the versions of Spark."""

from __future__ import annotations

import pyspark
import pytest

OF_THE_DOCS = tuple(map(int, pyspark.__version__.split(".")[:2])) >= (4, 3)
"""The docs show what Spark 4.3 says, which takes state under the real-time trigger, too."""
as_in_the_docs = pytest.mark.skipif(not OF_THE_DOCS, reason="the docs show what Spark 4.3 says")
