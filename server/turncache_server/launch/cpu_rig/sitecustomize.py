"""Keeps NIXL's progress thread from burning a core. On ``PYTHONPATH`` of CPU engines only.

NIXL's Python API hard-codes ``agent_config.pthrDelay = 0``: the progress thread of every
agent polls without a pause and takes a whole core, even when nothing is transferred. Two
engines on two cores then starve each other: a prefill of 1.2 s was seen to take 62 s. The
thread cannot be switched off, because over TCP the side that is read from has to make
progress as well. With 2,000 microseconds a transfer waits at most that long for it.

The value is set where it is handed to the native agent; nothing of NIXL's is edited, and
stock engines get the same, so that comparisons stay fair. On a GPU machine this module is
not used: there is a core to spare, and microseconds count.

Python imports one ``sitecustomize``, the first on the path; one that this hides is run too.
"""

# ruff: noqa: INP001 - a folder for PYTHONPATH, not a package
from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PROGRESS_DELAY_US = 2000
API_MODULES = frozenset({"nixl_cu12._api", "nixl_cu13._api"})


class DelayedBindings(types.ModuleType):
    """NIXL's native bindings, except that an agent gets a progress delay."""

    def __init__(self, bindings: types.ModuleType) -> None:
        super().__init__(bindings.__name__, bindings.__doc__)
        self._bindings = bindings

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bindings, name)

    def nixlAgent(self, name: str, config: Any, *rest: Any) -> Any:  # noqa: N802 - NIXL's name
        """Create the native agent, with the delay in its configuration."""
        config.pthrDelay = PROGRESS_DELAY_US
        return self._bindings.nixlAgent(name, config, *rest)


class _Finder(importlib.abc.MetaPathFinder):
    """Finds NIXL's API as everybody does, and wraps its bindings once it is loaded."""

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None,
        target: types.ModuleType | None = None,
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in API_MODULES:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader)
        return spec


class _Loader(importlib.abc.Loader):
    def __init__(self, inner: importlib.abc.Loader) -> None:
        self._inner = inner

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._inner.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._inner.exec_module(module)
        module.__dict__["nixlBind"] = DelayedBindings(module.__dict__["nixlBind"])


def _run_hidden_sitecustomize() -> None:
    here = Path(__file__).resolve().parent
    others = [entry for entry in sys.path if Path(entry).resolve() != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", others)
    if spec is not None and spec.loader is not None:
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


sys.meta_path.insert(0, _Finder())
_run_hidden_sitecustomize()
