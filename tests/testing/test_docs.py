"""The examples in docs/testing.md run as written."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.sparks import short_lived

pytest_plugins = ["pytester"]
DOCS = Path(__file__).resolve().parents[2] / "docs/testing.md"
EXAMPLES = re.findall(r"```python\n(.*?)```", DOCS.read_text(), re.DOTALL)


def test_the_example_tests_pass_with_only_the_plugin_installed(
    pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a user's project: saved as they are, in a separate process, and in a time zone far from UTC."""
    monkeypatch.setenv("TZ", "America/New_York")
    monkeypatch.setenv("SPARK_SUBMIT_OPTS", short_lived())
    monkeypatch.delenv("PENSTOCK_TEST_PG_URL", raising=False)
    pytester.makepyfile(**{f"test_example_{number}": example for number, example in enumerate(EXAMPLES)})
    pytester.runpytest_subprocess("-p", "no:cacheprovider").assert_outcomes(passed=4)
