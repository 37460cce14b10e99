"""Makes the model ``tiny``: ``python -m turncache_server.launch.recipes.tiny FOLDER``."""

from __future__ import annotations

import sys
import sysconfig
from pathlib import Path
from typing import Final

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from turncache_server.launch.recipes.template import chat_template

VOCABULARY: Final = 4096
#: Room for the tokens added after training; a multiple of 64 suits every kernel.
PADDED_VOCABULARY: Final = VOCABULARY + 64
NUM_TRAINING_FILES: Final = 80
HIDDEN: Final = 512
NUM_LAYERS: Final = 8
HEAD: Final = 64
MAX_TOKENS: Final = 32_768
PAD: Final = "<|endoftext|>"
START: Final = "<|im_start|>"
END: Final = "<|im_end|>"


def train_tokenizer() -> PreTrainedTokenizerFast:
    """Train a byte-level BPE on the standard library's own source."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    source = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:NUM_TRAINING_FILES]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[PAD, START, END],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train([str(path) for path in source], trainer)
    # Not special: a tool parser has to see them in the decoded text.
    tokenizer.add_tokens(["<tool_call>", "</tool_call>"])
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END, pad_token=PAD)
    wrapped.chat_template = chat_template()
    return wrapped


def main(folder: Path) -> None:
    """Write tokenizer, configuration and seeded random weights into ``folder``."""
    tokenizer = train_tokenizer()
    tokenizer.save_pretrained(folder)
    num_heads = HIDDEN // HEAD
    config = Qwen3Config(
        vocab_size=PADDED_VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=3 * HIDDEN,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=HEAD,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        eos_token_id=tokenizer.convert_tokens_to_ids(END),
        pad_token_id=tokenizer.convert_tokens_to_ids(PAD),
        bos_token_id=None,
    )
    torch.manual_seed(0)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
