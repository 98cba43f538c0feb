"""Test sessions load Spark's classes from an archive; without it every JVM takes twice as long to start."""

from __future__ import annotations

from pathlib import Path

from tests.support.class_archive import class_archive


def test_the_archive_can_be_created() -> None:
    assert Path(class_archive()).is_file()
