"""Code blocks in README and docs are valid code and use existing names."""

from __future__ import annotations

import ast
from importlib import import_module
from pathlib import Path

import pytest

import penstock
from tests.support.pages import ROOT, Block, blocks, pages

# The reference shows signatures.
PAGES = [page for page in pages() if "reference" not in page.parts]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_blocks_are_valid_and_use_public_names(page: Path) -> None:
    for block in blocks(page):
        if block.language == "python":
            for name in _names(block):
                assert name in penstock.__all__, name
            for module, name in _names_of_modules(block):
                assert name in import_module(f"penstock.{module}").__all__, f"penstock.{module}.{name}"


def _names(block: Block) -> set[str]:
    return {
        node.attr
        for node in ast.walk(ast.parse(block.body))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "penstock"
    }


def _names_of_modules(block: Block) -> set[tuple[str, str]]:
    return {
        (node.value.attr, node.attr)
        for node in ast.walk(ast.parse(block.body))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Attribute)
        and isinstance(node.value.value, ast.Name)
        and node.value.value.id == "penstock"
        and node.value.attr in {"changes", "limits", "modes", "state"}
    }
