"""What prompts lead to, and the memory that holds it: chain values in the place of KV."""

from __future__ import annotations

from collections.abc import Sequence

from tests.builders.configuration import BLOCK, VOCAB

#: What a step may read and write; the value of a slot that nobody has written.
NOTHING = -1


class WrongKV(AssertionError):
    """Raised when a request is computed with KV of other content than its tokens promise."""


class Text:
    """What a prompt leads to: its tokens and, at each position, the chain value of its KV.

    The model is a function: the token after a chain value is always the same. So the text
    of a call is known from its prompt alone, and equals what recomputation gives.
    """

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self.chain: list[int] = []
        self._value = 0

    def upto(self, count: int) -> Sequence[int]:
        """Return the chain values of the first ``count`` positions, writing on as needed."""
        while len(self.chain) < count:
            position = len(self.chain)
            if position == len(self.tokens):
                self.tokens.append(2 + self._value % (VOCAB - 2))
            self._value = hash((self._value, self.tokens[position])) & 0x7FFFFFFFFFFF
            self.chain.append(self._value)
        return self.chain[:count]

    def token_after(self, count: int) -> int:
        """Return the token that follows the first ``count``."""
        self.upto(count + 1)
        return self.tokens[count]


class Memory:
    """The KV cache of one rank: a chain value per slot."""

    def __init__(self, num_blocks: int) -> None:
        self.slots = [[NOTHING] * BLOCK for _ in range(num_blocks)]

    def read(self, table: Sequence[int], count: int) -> list[int]:
        """Read the first ``count`` positions of a block table."""
        out: list[int] = []
        for block_id in table[: -(-count // BLOCK)]:
            out += self.slots[block_id]
        return out[:count]

    def write(self, table: Sequence[int], start: int, values: Sequence[int]) -> None:
        """Write positions from ``start`` on."""
        for position, value in enumerate(values, start):
            self.slots[table[position // BLOCK]][position % BLOCK] = value


def tokens(count: int, start: int = 1000) -> list[int]:
    """Return a prompt; other starts give other prompts from the first token on."""
    return [2 + (start * 13 + i * 7) % (VOCAB - 2) for i in range(count)]
