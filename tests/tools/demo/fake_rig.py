"""A fake rig: prompts as words, KV by content, and faults on demand. No sockets, no sleeps.

Its KV follows the rules that the demo relies on: whole blocks only, one salt never sees
another's, everything that is not retained, or whose session has ended, is gone after the others'
traffic, decode alone has the answer's KV, and prefill takes it from there only while returns are
on.
"""

from __future__ import annotations

import functools
import hashlib
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from turncache import Outcome
from turncache.errors import EngineFault
from turncache.protocol import Mode, Plan, Reason
from turncache_tools.demo.answers import Answer
from turncache_tools.demo.callers import Question, Reply, ignore
from turncache_tools.demo.compare import common_prefix
from turncache_tools.demo.counters import PromptTokens
from turncache_tools.demo.history import Message
from turncache_tools.demo.rigs import Engines
from turncache_tools.demo.sizes import BLOCK_SIZE, Sizes

TOKEN_S = 0.001


class FakeClock:
    """Seconds that pass when the fake engines work."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


@functools.cache
def token(word: str) -> int:
    """Return the token of a word."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=3).digest(), "big")


def tokens_of(messages: Sequence[Message]) -> tuple[int, ...]:
    """Render messages, with a marker where each begins."""
    ids: list[int] = []
    for message in messages:
        ids.append(token(f"<{message['role']}>"))
        ids += [token(word) for word in str(message["content"]).split()]
    return (*ids, token("<assistant>"))


def says(prompt_ids: Sequence[int], num: int) -> list[str]:
    """Return the words that the fake model answers: the same for the same prompt."""
    seed = hashlib.blake2b(repr(tuple(prompt_ids)).encode(), digest_size=4).hexdigest()
    return [f"word-{seed}-{number}" for number in range(num)]


@dataclass
class Faults:
    """What goes wrong.

    Attributes:
        swap_call: in arms with KV reuse the answer to the n-th question (from 1, warm-ups
            and probes not counted) has another last word.
        gap: log-probability gap of every token.
        miscount: vLLM's counters see that many tokens more computed, and fewer local.
        forgets: nothing is ever retained.
        stale: the edited history is answered from the deleted document.
        dies_at: the n-th call of the rig finds a dead engine.
        drift_s: the machine gets slower by its first speed every so many seconds, 0: never.
        stalls: on engines of this kind the n-th call takes ten times its time.
    """

    swap_call: int = 0
    gap: float = 1.0
    miscount: int = 0
    forgets: bool = False
    stale: bool = False
    dies_at: int = 0
    drift_s: float = 0.0
    stalls: tuple[Engines, int] | None = None


@dataclass
class FakeRig:
    """One rig; its own caller."""

    engines: Engines
    sizes: Sizes
    clock: FakeClock
    faults: Faults
    mode: Mode = Mode.ON
    returns: bool = True
    stopped: bool = False
    closed: bool = False
    num_calls: int = 0
    modes: list[Mode] = field(default_factory=list)
    asked: list[tuple[int, str]] = field(default_factory=list)
    _questions: dict[str, int] = field(default_factory=dict)
    _prefill: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _decode: dict[str, tuple[int, ...]] = field(default_factory=dict)
    _filled: set[str] = field(default_factory=set)
    _ended: set[str] = field(default_factory=set)
    _counted: PromptTokens = field(default_factory=PromptTokens)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def caller(self) -> FakeRig:
        return self

    @property
    def returning(self) -> FakeRig | None:
        return None if self.ours else self

    @property
    def ours(self) -> bool:
        return self.engines is not Engines.STOCK

    @property
    def keeps(self) -> bool:
        return self.ours and self.mode is Mode.ON and not self.faults.forgets

    # --- the rig ------------------------------------------------------------------------------

    def prompt_tokens(self) -> PromptTokens:
        return self._counted

    def held(self) -> dict[str, float]:
        if not self.ours:
            return {}
        used = max((len(chain) for chain in self._prefill.values()), default=0)
        share = used / BLOCK_SIZE / self.sizes.num_blocks
        kept_here = self.keeps and not (self.engines is Engines.PAIR and self.returns)
        return {"prefill": share if kept_here else 0.0}

    def set_mode(self, mode: Mode) -> None:
        assert self.ours, "stock engines have no mode"
        self.modes.append(mode)
        self.mode = mode

    def set_return(self, *, enabled: bool) -> None:
        assert self.ours, "stock engines have no router"
        self.returns = enabled

    def count_tokens(self, text: str) -> int:
        return len(text.split())

    def stop(self) -> None:
        self.stopped = True

    def close(self) -> None:
        self.closed = True

    # --- calls --------------------------------------------------------------------------------

    def ask(self, question: Question, on_text: Callable[[str], None] = ignore) -> Reply:
        self._count_call()
        self.asked.append((self.num_calls, question.salt))
        prompt = tokens_of(question.messages)
        local, returned = self._found(question.salt, prompt)
        computed = len(prompt) - local - returned
        token_s = TOKEN_S * self._slowness()
        first_s = computed * token_s
        words = self._words(question, prompt)
        for word in words:
            on_text(f"{word} ")
        total_s = first_s + len(words) * token_s
        self.clock.now_s += total_s
        self._keep(question.salt, prompt, words)
        if question.final:
            self._ended.add(question.salt)
        extra = self.faults.miscount if question.session else 0
        self._counted = PromptTokens(
            computed=self._counted.computed + computed + extra,
            local=self._counted.local + local - extra,
            external=self._counted.external + returned,
        )
        answer = Answer(
            text=" ".join(words),
            token_ids=tuple(token(word) for word in words),
            gaps=(self.faults.gap,) * len(words),
            runners_up=(token("other"),) * len(words),
            prompt_ids=prompt,
            cached=local,
            first_s=first_s,
            total_s=total_s,
        )
        outcome = Outcome(
            prompt=len(prompt),
            local=local,
            returned=returned,
            computed=computed,
            plan=Plan.SINGLE,
            reason=Reason.OK,
        )
        return Reply(answer=answer, outcome=outcome if self.ours else None)

    def fill(self, messages: Sequence[Message], salt: str) -> int:
        self._count_call()
        with self._lock:
            assert salt not in self._filled, "its prompt may be cached"
            self._filled.add(salt)
            for ended in self._ended:
                self._prefill.pop(ended, None)
                self._decode.pop(ended, None)
            self.clock.now_s += len(tokens_of(messages)) * TOKEN_S * self._slowness()
            if not self.keeps:
                self._prefill.clear()
                self._decode.clear()
            elif self.engines is Engines.PAIR and self.returns:
                self._prefill.clear()
        return len(tokens_of(messages))

    def whole(
        self,
        messages: Sequence[Message],
        salt: str,
        *,
        max_tokens: int,
        returned: object = None,
    ) -> tuple[object, object]:
        """Answer as stock with returns does: from whatever was returned."""
        text = "The customer lives in London."
        if returned is not None:
            text = "The customer Laura lives in Rome."
            self._counted = PromptTokens(external=self._counted.external + 32)
        return _Completion(text), {"remote_block_ids": [1]}

    def _slowness(self) -> float:
        slowness = 1.0
        if self.faults.drift_s:
            slowness += self.clock.now_s / self.faults.drift_s
        return slowness * (10.0 if self.faults.stalls == (self.engines, self.num_calls) else 1.0)

    def _count_call(self) -> None:
        with self._lock:
            self.num_calls += 1
        if self.num_calls == self.faults.dies_at:
            raise EngineFault("prefill-0", "ended with exit code 137 while serving")

    def _found(self, salt: str, prompt: tuple[int, ...]) -> tuple[int, int]:
        most = len(prompt) - 1
        local = min(common_prefix(self._prefill.get(salt, ()), prompt), most)
        local -= local % BLOCK_SIZE
        if self.engines is not Engines.PAIR or not self.returns:
            return local, 0
        held = min(common_prefix(self._decode.get(salt, ()), prompt), most)
        held -= held % BLOCK_SIZE
        return local, max(0, held - local)

    def _words(self, question: Question, prompt: tuple[int, ...]) -> list[str]:
        words = says(prompt, question.max_tokens)
        if "edited" in question.salt and self.faults.stale and len(question.messages) > 2:
            return [*words[:-1], "Rome."]
        if question.session is None or "warm-up" in question.salt or "doc" in question.salt:
            return words
        number = self._questions[question.salt] = self._questions.get(question.salt, 0) + 1
        reusing = self.ours and self.mode is Mode.ON
        if reusing and number == self.faults.swap_call:
            return [*words[:-1], "other"]
        return words

    def _keep(self, salt: str, prompt: tuple[int, ...], words: Sequence[str]) -> None:
        chain = prompt + tuple(token(word) for word in words[:-1])
        if self.engines in (Engines.SINGLE, Engines.SINGLE_OFF):
            self._prefill[salt] = chain
        else:
            self._prefill[salt] = prompt
            self._decode[salt] = chain


class _Completion:
    """As much of a completion as the last act reads."""

    def __init__(self, text: str) -> None:
        message = type("Message", (), {"content": text})()
        self.choices = [type("Choice", (), {"message": message})()]


class FakeStarter:
    """Starts fake rigs and remembers them."""

    def __init__(
        self, clock: FakeClock, faults: Faults | None = None, *, start_s: float = 1.0
    ) -> None:
        self.clock = clock
        self.faults = faults or Faults()
        self.start_s = start_s
        self.rigs: list[FakeRig] = []

    def __call__(self, engines: Engines, sizes: Sizes) -> FakeRig:
        self.clock.now_s += self.start_s
        rig = FakeRig(engines, sizes, self.clock, self.faults)
        self.rigs.append(rig)
        return rig
