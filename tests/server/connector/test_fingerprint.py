"""What must be equal before KV may cross: other weights never are, the way of writing is."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from turncache_server.connector.fingerprint import (
    config_digest,
    engine_fingerprint,
    weights_digest,
)
from turncache_server.connector.peers import difference

LENGTH = 8192
CONFIG = {
    "hidden_size": 64,
    "rope_scaling": {"type": "yarn", "factor": 4.0},
    "architectures": ["Qwen3ForCausalLM"],
    "_name_or_path": "/models/a",
    "transformers_version": "5.0",
}


def folder(path: Path, files: dict[str, bytes]) -> Path:
    """Make a model folder."""
    path.mkdir()
    for name, content in files.items():
        (path / name).write_bytes(content)
    return path


def weights(size: int, flip_at: int | None = None) -> bytes:
    """Return the bytes of a weight file, one of them changed."""
    content = bytearray(i * 37 % 251 for i in range(size))
    if flip_at is not None:
        content[flip_at] ^= 0xFF
    return bytes(content)


def test_member_order_does_not_matter() -> None:
    """Two engines may resolve one configuration in another order."""
    nested = dict(reversed(CONFIG["rope_scaling"].items()))  # type: ignore[attr-defined]
    reordered = {**dict(reversed(CONFIG.items())), "rope_scaling": nested}
    assert list(reordered) != list(CONFIG)
    assert config_digest(reordered, max_model_len=LENGTH) == config_digest(
        CONFIG, max_model_len=LENGTH
    )


def test_where_a_model_came_from_does_not_matter() -> None:
    """Path and library version say nothing about what is computed."""
    moved = {**CONFIG, "_name_or_path": "/elsewhere", "transformers_version": "6.0"}
    assert config_digest(moved, max_model_len=LENGTH) == config_digest(CONFIG, max_model_len=LENGTH)


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": 65},
        {"rope_scaling": {"type": "yarn", "factor": 8.0}},
        {"rope_scaling": None},
        {"new": 1},
    ],
)
def test_what_is_computed_does_matter(changes: dict[str, Any]) -> None:
    """An override of rope scaling gives other KV for equal tokens."""
    assert config_digest({**CONFIG, **changes}, max_model_len=LENGTH) != config_digest(
        CONFIG, max_model_len=LENGTH
    )


@pytest.mark.parametrize("where", ["rope_scaling", "text_config"])
@pytest.mark.parametrize("named", ["rope_type", "type"])
def test_two_ways_of_positions_are_two_configurations(where: str, named: str) -> None:
    """VLLM takes LongRoPE's long factors by the longest sequence, however short a prompt is."""
    rope: dict[str, Any] = {named: "longrope", "long_factor": [2.0]}
    config = {**CONFIG, where: rope if where == "rope_scaling" else {"rope_parameters": rope}}
    one, same, other = (config_digest(config, max_model_len=n) for n in (4096, 4096, 8192))
    assert one == same != other


def test_how_long_a_sequence_may_be_does_not_matter_else() -> None:
    """Prefill may be started for longer prompts than decode."""
    one, other = (config_digest(CONFIG, max_model_len=n) for n in (4096, 8192))
    assert one == other


def test_the_same_files_are_the_same_weights(tmp_path: Path) -> None:
    """In whatever folder, beside whatever else."""
    one = folder(tmp_path / "a", {"m.safetensors": weights(9000), "config.json": b"{}"})
    two = folder(tmp_path / "b", {"m.safetensors": weights(9000), "tokenizer.json": b"x"})
    assert weights_digest(one) == weights_digest(two)


@pytest.mark.parametrize("size", [100, 4096, 9000, 200_000])
@pytest.mark.parametrize("where", [0.0, 0.5, 1.0])
def test_another_file_of_equal_name_and_size_differs(
    size: int, where: float, tmp_path: Path
) -> None:
    """A fine-tune has the same shapes: the content tells it apart."""
    at = int((size - 1) * where)
    one = folder(tmp_path / "a", {"m.safetensors": weights(size)})
    two = folder(tmp_path / "b", {"m.safetensors": weights(size, flip_at=at)})
    assert weights_digest(one) != weights_digest(two)


@pytest.mark.parametrize("at", [0, 1_234_567_890, 3 * 2**30 - 8 * 2**20])
def test_one_changed_layer_of_a_large_file_is_seen(at: int, tmp_path: Path) -> None:
    """Eight megabytes in three gigabytes; the files are sparse."""
    digests = set()
    for name, region in (("a", b""), ("b", b"x" * 8 * 2**20)):
        path = folder(tmp_path / name, {"m.safetensors": b""}) / "m.safetensors"
        with path.open("r+b") as file:
            file.truncate(3 * 2**30)
            file.seek(at)
            file.write(region)
        digests.add(weights_digest(path.parent))
    assert len(digests) == 2


def test_files_are_not_confused_with_each_other(tmp_path: Path) -> None:
    """Content that moved from one file to the next is another checkpoint."""
    one = folder(tmp_path / "a", {"1.bin": weights(50), "2.bin": weights(60)})
    two = folder(tmp_path / "b", {"1.bin": weights(60), "2.bin": weights(50)})
    three = folder(tmp_path / "c", {"1.bin": weights(50), "3.bin": weights(60)})
    assert len({weights_digest(each) for each in (one, two, three)}) == 3


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    """Two engines that load from elsewhere must not be equal by accident of an empty folder."""
    empty = folder(tmp_path / "a", {"config.json": b"{}"})
    assert weights_digest(empty) == "absent"
    for where in (empty, None):
        said = difference(fingerprint(where), fingerprint(where))
        assert said.startswith("weights: ")
        assert "weights_id" in said


def test_weights_that_cannot_be_read_go_by_their_name(tmp_path: Path) -> None:
    """Which the operator gives; what can be read is not a matter of names."""
    named = [fingerprint(None, weights_id=name) for name in ("a", "a", "b")]
    assert difference(named[0], named[1]) == ""
    assert difference(named[0], named[2]) == "weights: said to be a here, said to be b there"
    assert difference(named[0], fingerprint(None)) != ""
    read = folder(tmp_path / "a", {"m.bin": weights(50)})
    assert difference(fingerprint(read, weights_id="a"), fingerprint(read, weights_id="b")) == ""


def test_an_empty_weight_file_is_read(tmp_path: Path) -> None:
    """An interrupted download breaks nothing here."""
    assert weights_digest(folder(tmp_path / "a", {"m.bin": b""})) != "absent"


def fingerprint(model_folder: Path | None, **changes: Any) -> dict[str, str]:
    """Return an engine's fingerprint with one thing changed."""
    config = SimpleNamespace(
        model_config=SimpleNamespace(
            hf_config=SimpleNamespace(to_dict=lambda: dict(CONFIG)),
            revision=None,
            max_model_len=LENGTH,
            quantization=changes.get("quantization"),
            dtype=changes.get("dtype", "float32"),
        ),
        cache_config=SimpleNamespace(
            block_size=changes.get("block_size", 16), cache_dtype=changes.get("kv", "auto")
        ),
        parallel_config=SimpleNamespace(tensor_parallel_size=changes.get("tp", 1)),
    )
    return engine_fingerprint(
        config,
        vllm_version=changes.get("vllm", "0.32.0"),
        connector_version=changes.get("nixl", "14"),
        model_folder=model_folder,
        weights_id=changes.get("weights_id", ""),
        hash_block=lambda tokens: changes.get("seed", b"seed-one") + bytes(len(tokens)),
    )


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"dtype": "bfloat16"}, "dtype"),
        ({"kv": "fp8"}, "kv_cache_dtype"),
        ({"block_size": 32}, "block_size"),
        ({"tp": 2}, "tensor_parallel_size"),
        ({"vllm": "0.33.0"}, "vllm"),
        ({"nixl": "15"}, "nixl_connector"),
        ({"seed": b"seed-two"}, "hash_of_a_fixed_block"),
        ({"quantization": "awq"}, "quantization"),
    ],
)
def test_any_difference_is_named_with_both_values(changes: dict[str, Any], name: str) -> None:
    """Format, versions and hash seed; one line tells the operator what to change."""
    mine, theirs = fingerprint(None), fingerprint(None, **changes)
    said = difference(mine, theirs)
    assert f"{name}: {mine[name]} here, {theirs[name]} there" in said
    assert "\n" not in said


def test_other_weights_are_a_difference(tmp_path: Path) -> None:
    """Equal configuration and file names, other content."""
    one = folder(tmp_path / "a", {"m.safetensors": weights(500)})
    two = folder(tmp_path / "b", {"m.safetensors": weights(500, flip_at=250)})
    said = difference(fingerprint(one), fingerprint(two))
    assert said.startswith("weights: ")
    assert difference(fingerprint(one), fingerprint(one)) == ""


FINGERPRINTS = st.dictionaries(st.sampled_from("abcd"), st.sampled_from("xyz"))


@given(FINGERPRINTS, FINGERPRINTS)
def test_only_equal_fingerprints_have_no_difference(
    mine: dict[str, str], theirs: dict[str, str]
) -> None:
    """A member that one side lacks counts too."""
    assert (difference(mine, theirs) == "") == (mine == theirs)
