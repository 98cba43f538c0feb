"""Check that Spark's private API is used in ``penstock.spark.internals`` only."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[1] / "src/penstock"
INTERNALS = SOURCE / "spark/internals"
_ATTRIBUTES = {
    "_jvm", "_jdf", "_jsc", "_jsparkSession", "_jlistener", "_gateway", "_jc", "_jreader", "_jwrite",
    "_active_spark_context", "_explain_string", "_sc",
}  # fmt: skip
_PACKAGES = (
    "py4j", "pyspark.cloudpickle", "pyspark.daemon", "pyspark.serializers", "pyspark.sql.classic",
    "pyspark.sql.connect", "pyspark.sql.pandas", "pyspark.sql.worker", "pyspark.util", "pyspark.worker",
    "pyspark.worker_util",
)  # fmt: skip
_CLASS_PREFIXES = ("org.apache.spark.",)
_ALLOWED = {"extras.py": ("py4j",)}
"""Allowed names by file: packages that an extra installs."""


def main() -> int:
    uses = [
        use
        for path in sorted(SOURCE.rglob("*.py"))
        if INTERNALS not in path.parents
        for use in _find_uses(path)
    ]
    for use in uses:
        print(use)
    return 1 if uses else 0


def _find_uses(path: Path) -> Iterator[str]:
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            docstrings.add(id(node.value))
        name = _private_name(node, docstrings)
        if name is not None and name not in _ALLOWED.get(path.name, ()):
            location = f"{path.relative_to(SOURCE.parents[1])}:{getattr(node, 'lineno', 1)}"
            yield f"{location}: {name} is Spark's private API: use it in penstock.spark.internals"


def _private_name(node: ast.AST, docstrings: set[int]) -> str | None:
    if isinstance(node, ast.Attribute) and node.attr in _ATTRIBUTES:
        return node.attr
    if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in docstrings:
        private_names = (*_ATTRIBUTES, "py4j")
        return node.value if node.value in private_names or node.value.startswith(_CLASS_PREFIXES) else None
    if isinstance(node, ast.Import):
        return next((alias.name for alias in node.names if alias.name.startswith(_PACKAGES)), None)
    if isinstance(node, ast.ImportFrom) and node.module is not None:
        if node.module.startswith(_PACKAGES):
            return node.module
        if node.module.startswith("pyspark"):
            return next((alias.name for alias in node.names if alias.name.startswith("_")), None)
    return None


if __name__ == "__main__":
    sys.exit(main())
