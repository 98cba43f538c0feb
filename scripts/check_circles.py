"""Check that no modules of the package import one another in a circle.

Imports for types only, and those inside a function, count too.
"""

from __future__ import annotations

import ast
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

SRC = Path(__file__).resolve().parents[1] / "src"


def main() -> int:
    """Print the first circle, and return 1 when there is one."""
    modules = {_name(path): path for path in (SRC / "penstock").rglob("*.py")}
    graph = {name: _imports(path, modules) for name, path in modules.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        print("import circle: " + " -> ".join(error.args[1]))
        return 1
    return 0


def _name(path: Path) -> str:
    return ".".join(path.relative_to(SRC).with_suffix("").parts).removesuffix(".__init__")


def _imports(path: Path, modules: dict[str, Path]) -> set[str]:
    """Return the modules that a file names in its imports.

    Those of a package's lazy attributes are strings, and do not count.
    """
    imported = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            imported |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            imported |= {_imported(node.module, alias.name, modules) for alias in node.names}
    own = _name(path)
    return {name for name in imported if name in modules and own != name and not _is_lazy(path)}


def _imported(module: str, name: str, modules: dict[str, Path]) -> str:
    return f"{module}.{name}" if f"{module}.{name}" in modules else module


def _is_lazy(path: Path) -> bool:
    # A package's __init__ names what it loads on first use.
    return path.name == "__init__.py"


if __name__ == "__main__":
    sys.exit(main())
