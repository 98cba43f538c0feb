"""Checks without Node that the shipped page is built from the current `frontend/`.

`make page` writes digests of the page and its source into `frontend/page.digest`. `python
scripts/page_digest.py` reports which of them have changed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE = ROOT / "frontend"
PAGE = ROOT / "src/penstock/ui/page"
RECORD = SOURCE / "page.digest"


def source_files() -> Iterator[Path]:
    """Yield all files that the build reads. Tests and their samples are not included."""
    yield from (SOURCE / name for name in ("index.html", "package.json", "package-lock.json"))
    yield from (SOURCE / name for name in ("tsconfig.json", "vite.config.ts"))
    for folder in ("src", "public"):
        yield from (
            path for path in (SOURCE / folder).rglob("*") if path.is_file() and not _is_for_tests(path)
        )


def page_files() -> Iterator[Path]:
    return (path for path in PAGE.rglob("*") if path.is_file())


def digests() -> dict[str, str]:
    """Return the digests of the page and of its source."""
    return {"page": _digest(page_files(), PAGE), "source": _digest(source_files(), SOURCE)}


def recorded_digests() -> dict[str, str]:
    recorded: dict[str, str] = json.loads(RECORD.read_text())
    return recorded


def _is_for_tests(path: Path) -> bool:
    return path.name.endswith(".test.ts") or path.name == "sample.ts"


def _digest(paths: Iterator[Path], root: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        digest.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(content).hexdigest()}\n".encode())
    return digest.hexdigest()


def main() -> int:
    current = digests()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(current, indent=2) + "\n")
        return 0
    changed = [name for name, digest in recorded_digests().items() if current[name] != digest]
    for name in changed:
        print(f"The page's {name} has changed since the last `make page`: run it, and commit its output")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
