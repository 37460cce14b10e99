"""The rules of the design switched off, one each; the twin has to notice every one of them.

A mutant is done to an engine before anything has happened. Rules that the source keeps are
broken in a source of its own; the others in the reader or in vLLM's fence.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from types import MappingProxyType
from typing import Any, Final

import msgspec

from tests.builders import Engine
from turncache_server.connector.pull_state import Pull
from turncache_server.connector.source import GROUP_SUFFIX, Source, holders
from turncache_server.control.messages import PeekReply, RestBlock, Verify, VerifyReply

Mutant = Callable[[Engine], None]


class _OneByOne(Source):
    """Looks at every hash by :meth:`_written`, which its subclasses break."""

    def _named(self, hashes: list[bytes]) -> tuple[list[int], list[int]]:
        found = list(itertools.takewhile(bool, map(self._written, hashes)))
        return [each[0] for each in found if each], [each[1] for each in found if each]


class _NoMark(_OneByOne):
    """Takes a hash for written KV: vLLM lists a block before its forward pass."""

    def _written(self, chain_hash: bytes) -> tuple[int, int] | None:
        key = chain_hash + GROUP_SUFFIX
        for block in holders(self._map, key):
            if block.block_hash == key:
                return block.block_id, self._ledger.epoch[block.block_id]
        return None


class _NoEpoch(Source):
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


class _FlagBeforeEpoch(_OneByOne):
    """Reads whether a block is marked first and its epoch afterwards."""

    def _written(self, chain_hash: bytes) -> tuple[int, int] | None:
        key = chain_hash + GROUP_SUFFIX
        for block in holders(self._map, key):
            epoch = self._ledger.readable_epoch(block.block_id)
            if epoch is not None and block.block_hash == key:
                return block.block_id, self._ledger.epoch[block.block_id]
        return None


def _with_source(kind: type[Source]) -> Mutant:
    def mutate(engine: Engine) -> None:
        # The same tables, read in another way.
        engine.extension.source.__class__ = kind

    return mutate


def _failed_reads_are_read_again(engine: Engine) -> None:
    pulls = engine.pulls
    failed = pulls._failed

    def again(pull: Any, now_s: float) -> None:
        attempts = pull.attempts
        failed(pull, now_s)
        pull.attempts = attempts - 1
        pulls._rest_until_s.clear()

    pulls._failed = again


def _no_fence(engine: Engine) -> None:
    engine.scheduler.defer_block_free = False


def _abandoned_blocks_go_to_others(engine: Engine) -> None:
    engine.connector.connector_scheduler._abandon = lambda *_: None


def _nothing_is_verified(engine: Engine) -> None:
    engine.pulls._verified = lambda pull, _: (len(pull.blocks) - bool(pull.rest), pull.rest)


def _any_rest_fits(engine: Engine) -> None:
    engine.pulls.start = _with_any_rest(engine.pulls.start, engine.pulls)
    engine.pulls.search = _with_any_rest(engine.pulls.search, engine.pulls)


def _with_any_rest(begin: Any, pulls: Any) -> Any:
    def run(request_id: str, *args: Any, **kwargs: Any) -> Any:
        reason = begin(request_id, *args, **kwargs)
        pull = pulls.get(request_id)
        if pull is not None:
            pulls._pulls[request_id] = _Credulous(
                **{name: getattr(pull, name) for name in pull.__dataclass_fields__}
            )
        return reason

    return run


class _Credulous(Pull):
    """Takes whatever a source has behind its answer for its own prompt's."""

    __slots__ = ()

    def fitting(self, answer: PeekReply, block_size: int) -> RestBlock | None:
        start = len(answer.block_ids) * block_size
        return next((r for r in answer.rests if start + r.num_tokens < len(self.tokens)), None)


class _NoEpochOfRests(Source):
    """Confirms a rest without a look at its block's epoch."""

    def verify(self, question: Verify) -> VerifyReply:
        reply = super().verify(question)
        return msgspec.structs.replace(reply, rest=question.rest is not None)


def _an_abort_forgets_the_pull(engine: Engine) -> None:
    pulls = engine.pulls
    ended = pulls.ended

    def forget(request_id: str) -> Any:
        pull = ended(request_id)
        pulls._pulls.pop(request_id, None)
        pulls._reading.pop(request_id, None)
        return pull

    pulls.ended = forget


#: By name: what is switched off.
MUTANTS: Final = MappingProxyType(
    {
        "rule-1-no-mark": _with_source(_NoMark),
        "rule-2-failed-reads-again": _failed_reads_are_read_again,
        "rule-3-no-fence": _no_fence,
        "rule-4-abandoned-blocks-free": _abandoned_blocks_go_to_others,
        "rule-5-nothing-verified": _nothing_is_verified,
        "rule-5-abort-forgets": _an_abort_forgets_the_pull,
        "epoch-not-verified": _with_source(_NoEpoch),
        "flag-before-epoch": _with_source(_FlagBeforeEpoch),
        "rest-of-any-tokens": _any_rest_fits,
        "rest-epoch-not-verified": _with_source(_NoEpochOfRests),
    }
)
