"""Check that the package has no import cycles, and that test packages do not import from each other.

What test packages share is in ``tests/support``. Imports for types and imports inside functions count, too.
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
    """Print the first cycle and all imports between test packages. Return 1 if there are any."""
    violations = [
        f"{path.relative_to(ROOT)} imports {name} from another test package"
        for path in TESTS.rglob("*.py")
        for name in _foreign_test_imports(path)
    ]
    for line in violations:
        print(line)
    return 1 if violations or _has_cycle() else 0


def _foreign_test_imports(path: Path) -> list[str]:
    package = path.relative_to(TESTS).parts[0]
    imported = [name.split(".") for name in _imported_names(path) if name.startswith("tests.")]
    return [".".join(parts) for parts in imported if parts[1] not in ("support", package)]


def _has_cycle() -> bool:
    modules = {_name(path): path for path in (SRC / "penstock").rglob("*.py")}
    graph = {name: _imports(path, modules) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        print("import cycle: " + " -> ".join(error.args[1]))
        return True
    return False


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a file imports.

    Lazy attributes of packages are strings, and do not count.
    """
    imported = {name if name in modules else name.rpartition(".")[0] for name in _imported_names(path)}
    module = _name(path)
    return {name for name in imported if name in modules and module != name and not _is_lazy(path)}


def _imported_names(path: Path) -> Iterator[str]:
    """Yield the modules that a file imports, and the names that it imports from them."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def _is_lazy(path: Path) -> bool:
    # The __init__ of a package lists the names that it loads on first use.
    return path.name == "__init__.py"


if __name__ == "__main__":
    sys.exit(main())
