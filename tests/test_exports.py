"""The public surface: what the package says it exports is what it exports."""

from __future__ import annotations

import ast
import inspect
from pathlib import Path

import pytest

import turncache
import turncache.testing
from tests.sdk.support import printed_by


def test_all_is_sorted_and_complete() -> None:
    """``__all__`` is sorted, without doubles, and is what resolves on first use."""
    assert turncache.__all__ == sorted(set(turncache.__all__))
    assert set(turncache._HOME) == set(turncache.__all__)
    for name in turncache.__all__:
        assert getattr(turncache, name) is not None


def test_type_checkers_see_the_same_names() -> None:
    """The imports for type checkers are the lazy table, name by name and home by home."""
    tree = ast.parse(Path(turncache.__file__).read_text())
    [block] = [node for node in tree.body if isinstance(node, ast.If)]
    seen = {
        alias.name: (node.module or "").removeprefix("turncache.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert seen == turncache._HOME


def test_public_names_say_what_they_are() -> None:
    """Every public class and function has a docstring, and no name hides a module."""
    for name in turncache.__all__:
        value = getattr(turncache, name)
        assert inspect.getdoc(value), name
        assert not inspect.ismodule(value), name


def test_an_unknown_name_is_an_attribute_error() -> None:
    """A misspelt name fails as in any module."""
    with pytest.raises(AttributeError, match="no attribute 'OpenAi'"):
        _ = turncache.OpenAi


def test_names_are_listed() -> None:
    """Completion in a notebook shows the public names before their first use."""
    assert set(turncache.__all__) <= set(dir(turncache))


def test_importing_the_package_is_cheap() -> None:
    """The package, its wire contract and its errors import neither openai nor an HTTP library."""
    code = (
        "import sys, turncache, turncache.protocol, turncache.errors\n"
        "print(sorted({'openai', 'httpx', 'httpx2', 'pydantic'} & set(sys.modules)))"
    )
    assert printed_by(code) == "[]\n"


def test_the_door_to_langgraph_says_what_is_missing() -> None:
    """Without the extra, its import fails with the way out, and nothing else does."""
    code = (
        "import sys; sys.modules['langchain_core'] = None\n"
        "import turncache; turncache.OpenAI\n"
        "try: turncache.langgraph\n"
        "except ModuleNotFoundError as error: print(error)"
    )
    assert printed_by(code) == (
        "langchain_core is not installed, and turncache.langgraph needs it: "
        "pip install 'turncache[langgraph]'\n"
    )


def test_what_testing_exports() -> None:
    """The module for users' tests exports its four names."""
    names = turncache.testing.__all__
    assert names == sorted(names)
    for name in names:
        assert inspect.getdoc(getattr(turncache.testing, name)), name
