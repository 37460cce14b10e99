"""The list of kinds is complete: each has a test that is named after it and says what it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.faults.kinds import BENCHMARKS, PRESSURE, PROXY, REUSE, TRANSFER, WRAPPERS, Kind

TESTS = Path(__file__).resolve().parents[1]
KINDS = (*REUSE, *WRAPPERS, *BENCHMARKS, *TRANSFER, *PROXY, *PRESSURE)
FILES = sorted({kind.file for kind in KINDS})


def functions(file: str) -> dict[str, str | None]:
    """Return the test functions of a file with their docstrings."""
    tree = ast.parse((TESTS / file).read_text())
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return {node.name: ast.get_docstring(node) for node in tree.body if isinstance(node, kinds)}


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_each_kind_has_its_test(kind: Kind) -> None:
    """The function is there, under the kind's name, with a docstring."""
    assert functions(kind.file).get(f"test_{kind.name}"), f"{kind.file}: test_{kind.name}"


def test_no_kind_is_lost() -> None:
    """Names are unique, reports are there, and the numbers only grow."""
    assert len({kind.name for kind in KINDS}) == len(KINDS)
    assert all(kind.reports for kind in KINDS)
    assert len(REUSE) >= 15
    assert len(WRAPPERS) >= 12
    assert len(BENCHMARKS) >= 11
    assert len(TRANSFER) >= 23
    assert len(PROXY) >= 17
    assert len(PRESSURE) >= 7


@pytest.mark.parametrize("file", [file for file in FILES if file.startswith("faults/")])
def test_the_folder_holds_no_other_tests(file: str) -> None:
    """A test of this folder belongs to a kind of the list."""
    names = {f"test_{kind.name}" for kind in KINDS if kind.file == file}
    assert {name for name in functions(file) if name.startswith("test_")} == names
