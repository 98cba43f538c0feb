"""The page in the package is the build of `frontend/`, and loads nothing from elsewhere."""

from __future__ import annotations

import filecmp
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from scripts import page_digest
from scripts.page_digest import PAGE, SOURCE


def test_the_shipped_page_is_built_from_this_source() -> None:
    found = page_digest.digests()
    assert found == page_digest.recorded_digests(), "run `make page`, and commit what it makes"


@pytest.mark.soak
def test_a_build_is_reproducible(tmp_path: Path) -> None:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here: Node.js 20 or newer brings it")
    subprocess.run([SOURCE.parent / "scripts/ensure_page_modules.sh"], check=True)
    build = ["npm", "run", "--silent", "build", "--", "--outDir", str(tmp_path / "page"), "--emptyOutDir"]
    subprocess.run(build, cwd=SOURCE, check=True)
    names = [path.relative_to(PAGE).as_posix() for path in page_digest.page_files()]
    assert sorted(names) == sorted(
        path.relative_to(tmp_path / "page").as_posix() for path in tmp_path.rglob("*") if path.is_file()
    )
    assert filecmp.cmpfiles(PAGE, tmp_path / "page", names, shallow=False)[1:] == ([], [])


def test_the_page_has_no_inline_scripts_or_styles() -> None:
    markup = (PAGE / "index.html").read_text()
    assert re.findall(r"<script(?![^>]*\ssrc=)[^>]*>", markup) == []
    assert re.findall(r"<style|\sstyle=|\son\w+=", markup) == []
    assert set(re.findall(r"""(?:src|href)="([^"]*)""", markup)) == {
        f"/{path.relative_to(PAGE).as_posix()}"
        for path in page_digest.page_files()
        if path.name not in ("index.html", "licenses.md")
    }


def test_the_lock_file_contains_no_host_names() -> None:
    packages = json.loads((SOURCE / "package-lock.json").read_text())["packages"]
    assert len(packages) > 3
    assert [name for name, about in packages.items() if "resolved" in about] == []
    assert all("integrity" in about for name, about in packages.items() if name)
