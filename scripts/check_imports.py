"""Check that no modules of the package import one another in a circle, and that no package of tests borrows
from another one: what they share is in ``tests/support``.

Imports for types only, and those inside a function, count too.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SRC, TESTS = ROOT / "src", ROOT / "tests"


def main() -> int:
    """Print the first circle and everything that is borrowed; return 1 when there is any."""
    borrowed = [
        f"{path.relative_to(ROOT)} borrows {name}" for path in TESTS.rglob("*.py") for name in _borrowed(path)
    ]
    for line in borrowed:
        print(line)
    return 1 if borrowed or _circle() else 0


def _borrowed(path: Path) -> list[str]:
    package = path.relative_to(TESTS).parts[0]
    named = [name.split(".") for name in _named(path) if name.startswith("tests.")]
    return [".".join(parts) for parts in named if parts[1] not in ("support", package)]


def _circle() -> bool:
    modules = {_name(path): path for path in (SRC / "penstock").rglob("*.py")}
    graph = {name: _imports(path, modules) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        print("import circle: " + " -> ".join(error.args[1]))
        return True
    return False


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a file names in its imports.

    Those of a package's lazy attributes are strings, and do not count.
    """
    imported = {name if name in modules else name.rpartition(".")[0] for name in _named(path)}
    own = _name(path)
    return {name for name in imported if name in modules and own != name and not _is_lazy(path)}


def _named(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, and what it imports from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_lazy(path: Path) -> bool:
    # A package's __init__ names what it loads on first use.
    return path.name == "__init__.py"


if __name__ == "__main__":
    sys.exit(main())
