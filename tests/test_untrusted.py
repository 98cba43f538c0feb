"""Nothing that is read from a store, a checkpoint or a table is unpickled, evaluated or imported by name."""

from __future__ import annotations

import ast
import pickle
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

import penstock
from penstock.errors import PenstockError, QueryFailedError, error_class
from penstock.spark.error_boundary import original_error

SOURCE = Path(penstock.__file__).parent
RUNS_CODE = {"eval", "exec", "compile", "__import__", "import_module", "execfile"}
OPENS = {"loads", "Unpickler", "read_pickle", "unsafe_load", "full_load", "to_object"}
MODULES = {"pickle", "cloudpickle", "marshal", "dill", "joblib", "shelve", "yaml", "jsonpickle"}
ALLOWED = {
    # Names of Penstock's own modules.
    "extras.py": "import_module",
    "feeds/urls.py": "import_module",
    # What the command line names.
    "cli/spark_programs.py": "import_module",
    # A user's function, as Spark carries it from this driver to its workers.
    "spark/internals/udf_wrapper.py": "loads",
}


def calls() -> Iterator[tuple[str, str]]:
    """The calls that make code or objects out of data, and the modules that do, with their files."""
    for path in sorted(SOURCE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            for name in _made_by(node):
                yield str(path.relative_to(SOURCE)), name


def _made_by(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import | ast.ImportFrom):
        named = {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        yield from MODULES & {each.partition(".")[0] for each in named}
    elif isinstance(node, ast.Call):
        method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        owner = getattr(getattr(node.func, "value", None), "id", "")
        if (name in RUNS_CODE or (name in OPENS and method)) and owner not in ("json", "re"):
            yield name


def test_only_listed_files_turn_data_into_code_or_objects() -> None:
    assert {*calls()} == {*ALLOWED.items()}


class Trap:
    """Creates a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.path,)


def test_an_untrusted_arrow_schema_is_not_unpickled(tmp_path: Path) -> None:
    """Older versions of Arrow unpickled column types declared as Python extension types (CVE-2023-47248)."""
    sprung = tmp_path / "sprung"
    pickle.loads(pickle.dumps(Trap(sprung)))
    assert sprung.exists()
    sprung.unlink()
    metadata = {
        b"ARROW:extension:name": b"arrow.py_extension_type",
        b"ARROW:extension:metadata": pickle.dumps(Trap(sprung)),
    }
    hostile = pa.schema([pa.field("n", pa.int64(), metadata=metadata)])
    file = tmp_path / "x.db"
    with penstock.connect(f"sqlite:///{file}") as store:
        queue = store.create_queue("q", pa.schema([("n", pa.int64())]))
        queue.append([{"n": 1}])
    with sqlite3.connect(file) as own:
        own.execute("update penstock_queue set schema = ?", [hostile.serialize().to_pybytes()])
    own.close()
    with penstock.connect(f"sqlite:///{file}") as store:
        try:
            store.queue("q").read(0, 0).to_pylist()
            store.queue("q").info()
        except PenstockError:
            pass
    assert not sprung.exists()


@pytest.mark.parametrize(
    "name", ["Any", "condition_of", "partial", "annotations", "error_class", "NoSuchError", "builtins"]
)
def test_a_message_can_name_only_error_classes(name: str) -> None:
    assert error_class(name) is None
    error = original_error(RuntimeError(f"penstock.errors.{name}: [SOME_CONDITION] a row's text"))
    assert isinstance(error, QueryFailedError)
    assert error.condition == "SOME_CONDITION"


def test_errors_are_found_by_name() -> None:
    assert error_class("QueryFailedError") is QueryFailedError
    assert error_class("PenstockError") is PenstockError
