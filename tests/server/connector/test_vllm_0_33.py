"""What the connectors stand on is in vLLM 0.33 as it is in 0.32.

``vllm_0_33.json`` was read out of the Python sources of the 0.33.0 wheel, which runs on GPUs only:
parameters of the methods that we override, call or check at start, names that we import, and
attributes of vLLM's classes that ours use. The connectors are read here as text, because vLLM is
not installed beside the fast tests.
"""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any, Final

import pytest

from turncache_server.connector import config
from turncache_server.connector.selftest import POOL_ATTRIBUTES, POOL_METHODS, QUEUE_METHODS
from turncache_server.versions import Support, support_of

CONNECTOR: Final = Path(config.__file__).parent
TABLE: Final[dict[str, Any]] = json.loads(
    (Path(__file__).parent / "vllm_0_33.json").read_text(encoding="utf-8")
)
FILES: Final = {
    "RetentionConnector": "retention_connector.py",
    "TurncacheConnector": "turncache_connector.py",
    "PairScheduler": "pair_scheduler.py",
    "TurncacheWorker": "worker.py",
}


def read_class(name: str) -> ast.ClassDef:
    """Return one of our classes as text."""
    tree = ast.parse((CONNECTOR / FILES[name]).read_text(encoding="utf-8"))
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


def parameters(method: ast.FunctionDef) -> list[str]:
    """Return the names of a method's parameters, as the table has them."""
    given = method.args
    names = [each.arg for each in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    names += [f"*{given.vararg.arg}"] if given.vararg else []
    return names + ([f"**{given.kwarg.arg}"] if given.kwarg else [])


def of_self(tree: ast.AST) -> set[str]:
    """Return the attributes of ``self`` that a class names."""
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "self"
    }


@pytest.mark.parametrize("name", FILES)
def test_overridden_methods_take_what_they_are_given(name: str) -> None:
    """Parameter by parameter; constructors are ours."""
    theirs = TABLE["overridden"][name]
    ours = {n.name: parameters(n) for n in read_class(name).body if isinstance(n, ast.FunctionDef)}
    assert len(theirs) > 3
    assert {n: ours[n] for n in theirs if n != "__init__"} == {
        n: given for n, given in theirs.items() if n != "__init__"
    }


@pytest.mark.parametrize("name", FILES)
def test_what_is_taken_from_a_base_class_is_there(name: str) -> None:
    """Every attribute is ours, set or defined in the class, or in the table."""
    tree = read_class(name)
    defined = {n.name for n in tree.body if isinstance(n, ast.FunctionDef)}
    defined |= {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    assert of_self(tree) - defined <= set(TABLE["attributes"][name])


def test_the_self_test_would_find_what_it_expects() -> None:
    """Methods of queue and pool with their parameters, and attributes; the scratch pool too."""
    queue, pool = TABLE["classes"]["FreeKVCacheBlockQueue"], TABLE["classes"]["BlockPool"]
    assert queue == {name: ["self", *given] for name, given in QUEUE_METHODS.items()}
    assert {n: pool[n] for n in POOL_METHODS} == {
        name: ["self", *given] for name, given in POOL_METHODS.items()
    }
    assert set(POOL_ATTRIBUTES) <= set(TABLE["attributes"]["BlockPool"])
    assert TABLE["attributes"]["BlockHashToBlockMap"] == ["_cache"]
    assert pool["__init__"][:4] == ["self", "num_gpu_blocks", "enable_caching", "hash_block_size"]


def test_every_name_that_is_imported_is_there() -> None:
    """From every module of the connector."""
    for file in CONNECTOR.glob("*.py"):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vllm."):
                assert {each.name for each in node.names} <= set(TABLE["imports"][node.module])


def test_what_was_only_read_is_not_tested() -> None:
    """On 0.33 the extension starts in mode observe: sources are no run."""
    assert support_of(TABLE["vllm"]) is Support.UNTESTED
