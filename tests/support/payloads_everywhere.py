"""Runs the tests with the payloads of all queues in objects: ``PENSTOCK_TEST_PAYLOADS=FOLDER make test``.

All tests of queues must pass with objects, too.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType

FOLDER = "PENSTOCK_TEST_PAYLOADS"
"""The environment variable with the folder of the objects."""


def install() -> None:
    """Make this process store all payloads in objects, once it imports the modules that do so."""
    sys.meta_path.insert(0, _Finder())


def apply() -> None:
    """Patch the modules now, in the process of pytest, which imports them before it rewrites assertions."""
    for name, patch in _PATCHES.items():
        patch(import_module(name))


def _no_inline_payloads(module: ModuleType) -> None:
    module.INLINE_BYTES = 0  # type: ignore[attr-defined]


def _default_location(module: ModuleType) -> None:
    original = module.Store._location

    def location(self: object, payloads: object) -> object:
        return original(self, os.environ[FOLDER] if payloads is None else payloads)

    module.Store._location = location


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "penstock.store.log.payloads": _no_inline_payloads,
    "penstock.queue.store": _default_location,
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _PATCHES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _PATCHES[fullname])
        return spec


class _Loader(Loader):
    def __init__(self, loader: Loader, patch: Callable[[ModuleType], None]) -> None:
        self._loader = loader
        self._patch = patch

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._patch(module)
