"""What installing the extension does to an engine's environment: nothing."""

from __future__ import annotations

from importlib.metadata import requires, version

from packaging.requirements import Requirement


def test_the_engine_extra_adds_nothing_that_vllm_does_not_bring() -> None:
    """Every requirement of ``turncache[engine]`` is met by the pinned engine environment."""
    needed = [
        requirement
        for text in requires("turncache") or []
        if (requirement := Requirement(text)).marker is None
        or requirement.marker.evaluate({"extra": "engine"})
    ]
    assert needed, "the metadata of turncache is not installed"
    for requirement in needed:
        installed = version(requirement.name)
        assert requirement.specifier.contains(installed), f"{requirement}: {installed} is installed"
