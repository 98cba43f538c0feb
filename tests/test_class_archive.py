"""Test sessions start from an archive of Spark's classes; without it every JVM takes twice as long."""

from __future__ import annotations

from pathlib import Path

from tests.support.class_archive import class_archive


def test_the_archive_can_be_made() -> None:
    assert Path(class_archive()).is_file()
