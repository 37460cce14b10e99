"""Models, memory and weights, before anything starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from turncache.errors import ConfigError, EnvironmentFault
from turncache_server.launch.machine import EngineEnvironment, Machine
from turncache_server.launch.preflight import (
    check_environment,
    check_fleet,
    check_memory,
    resolve_model,
    weights_bytes,
)
from turncache_server.launch.spec import StackSpec

GIB = 2**30


def environment(*, cuda: bool = False) -> EngineEnvironment:
    """Describe a complete engine environment."""
    return EngineEnvironment(
        python="python", vllm_version="0.32.0", cuda=cuda, nixl=True, turncache=True
    )


def quiet(_text: str) -> None:
    """Take progress lines and drop them."""


@pytest.mark.parametrize(
    "name", ["/no/such/folder", "./missing", "~/missing-model", "a/b/c"], ids=str
)
def test_a_path_that_does_not_exist_is_refused(name: str) -> None:
    """What can only be a path has to exist; the message names the models that are made here."""
    with pytest.raises(ConfigError, match=r"does not exist: .*smollm2, tiny"):
        resolve_model(StackSpec(model=name), "python", quiet)


def test_a_folder_without_a_model_is_refused(tmp_path: Path) -> None:
    """A folder needs a configuration to be a model."""
    with pytest.raises(ConfigError, match=r"holds no config\.json"):
        resolve_model(StackSpec(model=str(tmp_path)), "python", quiet)


def test_a_folder_becomes_absolute(model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines may run elsewhere: they get the whole path."""
    monkeypatch.chdir(model_folder.parent)
    assert resolve_model(StackSpec(model=model_folder.name), "python", quiet) == str(model_folder)


@pytest.mark.parametrize("name", ["Qwen/Qwen3-0.6B", "gpt2"])
def test_a_hub_name_is_left_to_vllm(name: str) -> None:
    """Whether the hub has it is not for us to ask."""
    assert resolve_model(StackSpec(model=name), "python", quiet) == name


@pytest.mark.parametrize(
    ("dtype", "expected"),
    [(None, 1_000_000), ("bfloat16", 1_000_000), ("auto", 1_000_000), ("float32", 2_000_000)],
)
def test_weights_are_estimated_in_the_dtype_of_the_engine(
    model_folder: Path, dtype: str | None, expected: int
) -> None:
    """A model stored in two bytes takes twice the space in float32."""
    assert weights_bytes(model_folder, dtype) == expected


def test_weights_that_are_elsewhere_count_nothing(tmp_path: Path) -> None:
    """A hub model is not measured, and neither is an empty folder."""
    assert weights_bytes(Path("Qwen/Qwen3-0.6B"), None) == 0
    assert weights_bytes(tmp_path, None) == 0


def test_memory_is_counted_per_engine(model_folder: Path) -> None:
    """What suffices for one engine may not for a pair; the message has the sum."""
    machine = Machine(cores=(0,), memory_available_bytes=4 * GIB)
    one = StackSpec(model=str(model_folder))
    pair = StackSpec(model=str(model_folder), prefill=1, decode=1)
    check_memory(one, machine, environment())
    with pytest.raises(EnvironmentFault, match=r"2 x \(weights 0\.0 \+ KV space 1 .* 4\.0 GiB"):
        check_memory(pair, machine, environment())


def test_memory_of_a_gpu_is_left_to_vllm(model_folder: Path) -> None:
    """On a GPU main memory is not what runs out."""
    machine = Machine(cores=(0,), memory_available_bytes=0, gpus=("0",))
    check_memory(StackSpec(model=str(model_folder)), machine, environment(cuda=True))


def test_a_gpu_is_refused_with_a_cpu_build() -> None:
    """A CPU build of torch cannot drive a GPU."""
    with pytest.raises(ConfigError, match="torch is a CPU build"):
        check_environment(StackSpec(model="m", device="cuda"), environment())


def test_a_fleets_secret_is_checked_before_anything_starts(tmp_path: Path) -> None:
    """As engines and router will; without one there is nothing to check."""
    check_fleet(StackSpec(model="m"))
    path = tmp_path / "fleet.secret"
    path.touch(mode=0o600)
    path.write_text("0123456789abcdef" * 4)
    with pytest.raises(ConfigError, match="bits of entropy"):
        check_fleet(StackSpec(model="m", fleet_secret_file=path))


def test_engines_on_other_machines_are_not_started_here(tmp_path: Path) -> None:
    """The message names the verb that prints what to start there."""
    spec = StackSpec(
        model="m", engine_hosts={"single-0": "10.0.0.1"}, fleet_secret_file=tmp_path / "s"
    )
    with pytest.raises(ConfigError, match="turncache flags"):
        check_fleet(spec)
