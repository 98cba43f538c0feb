"""Tests with the payloads of all queues in objects: ``PENSTOCK_TEST_PAYLOADS=FOLDER make test``.

What the tests say of queues has to be true of these, too.
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
"""The variable with the folder of the objects."""


def install() -> None:
    """Have this process keep all payloads in objects, as soon as it imports the modules concerned."""
    sys.meta_path.insert(0, _Finder())


def apply() -> None:
    """Do it now, in the process of pytest, which imports Penstock itself to rewrite assertions."""
    for name, change in _CHANGED.items():
        change(import_module(name))


def _no_inline_payloads(module: ModuleType) -> None:
    module.INLINE_BYTES = 0  # type: ignore[attr-defined]


def _default_location(module: ModuleType) -> None:
    real = module.Store._location

    def location(self: object, payloads: object) -> object:
        return real(self, os.environ[FOLDER] if payloads is None else payloads)

    module.Store._location = location


_CHANGED: dict[str, Callable[[ModuleType], None]] = {
    "penstock.store.log.payloads": _no_inline_payloads,
    "penstock.queue.store": _default_location,
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in _CHANGED:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, _CHANGED[fullname])
        return spec


class _Loader(Loader):
    def __init__(self, real: Loader, change: Callable[[ModuleType], None]) -> None:
        self._real = real
        self._change = change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        self._change(module)
