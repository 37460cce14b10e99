"""Sources that break one rule each; the soak has to notice."""

from __future__ import annotations

from turncache_server.connector.source import GROUP_SUFFIX, Source, holders
from turncache_server.control.messages import Verify, VerifyReply


class NoEpochInVerify(Source):
    """Confirms by hash alone: a block that was handed out and filled anew passes."""

    def verify(self, question: Verify) -> VerifyReply:
        generation = self.generation()
        valid = 0
        if question.start_id == self.start_id and question.generation == generation:
            for block_id, chain_hash in zip(question.block_ids, question.hashes, strict=True):
                if self._pool.blocks[block_id].block_hash != chain_hash + GROUP_SUFFIX:
                    break
                valid += 1
        return VerifyReply(start_id=self.start_id, generation=generation, valid=valid)


class NoMark(Source):
    """Takes a hash for written KV: vLLM lists a block before its forward pass."""

    def _written(self, chain_hash: bytes) -> tuple[int, int] | None:
        key = chain_hash + GROUP_SUFFIX
        for block in holders(self._map, key):
            if block.block_hash == key:
                return block.block_id, self._ledger.epoch[block.block_id]
        return None
