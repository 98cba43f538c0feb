"""Whether the page that is shipped is what `frontend/` builds, told without Node.

`make page` writes what it built from, and what came out, into `frontend/page.digest`;
`python scripts/page_digest.py` says what has changed since.
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
    """All that the build reads: tests and their samples are none of it."""
    yield from (SOURCE / name for name in ("index.html", "package.json", "package-lock.json"))
    yield from (SOURCE / name for name in ("tsconfig.json", "vite.config.ts"))
    for folder in ("src", "public"):
        yield from (path for path in (SOURCE / folder).rglob("*") if path.is_file() and not _of_tests(path))


def page_files() -> Iterator[Path]:
    return (path for path in PAGE.rglob("*") if path.is_file())


def digests() -> dict[str, str]:
    """The digest of what the page is built from, and of what was built."""
    return {"page": _digest(page_files(), PAGE), "source": _digest(source_files(), SOURCE)}


def recorded() -> dict[str, str]:
    found: dict[str, str] = json.loads(RECORD.read_text())
    return found


def _of_tests(path: Path) -> bool:
    return path.name.endswith(".test.ts") or path.name == "sample.ts"


def _digest(paths: Iterator[Path], root: Path) -> str:
    whole = hashlib.sha256()
    for path in sorted(paths):
        content = path.read_bytes().replace(b"\r\n", b"\n")
        whole.update(f"{path.relative_to(root).as_posix()} {hashlib.sha256(content).hexdigest()}\n".encode())
    return whole.hexdigest()


def main() -> int:
    found = digests()
    if sys.argv[1:] == ["--write"]:
        RECORD.write_text(json.dumps(found, indent=2) + "\n")
        return 0
    changed = [name for name, digest in recorded().items() if found[name] != digest]
    for name in changed:
        print(f"The page's {name} is not what `make page` left: run it, and commit what it makes")
    return 1 if changed else 0


if __name__ == "__main__":
    sys.exit(main())
