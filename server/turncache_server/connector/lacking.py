"""Hand-overs that prefill has lost before they were pulled. Owner of who waits for a repeat.

A decode engine that computed such a prompt would stall every stream on it. Where the call's
router has said that it can repeat the prefill leg, the call waits instead, like one whose
peek is under way: it holds no block, and the scheduler is told to ask again. It is named to
the router, which has the prompt computed once more and says by whom; then the new source is
peeked at. A wait ends by that, by the router's no, or by its time; a call that has waited in
vain computes, as it would have at once.

A source that has not answered may have the prompt all the same: its call is named only after a
moment in which it is peeked at once more. While a source has just failed, one call at a time does
that for all that wait for it: a source that is gone must not keep the threads that ask others.

The engine thread begins and ends waits. The control thread reads who waits, and puts what
the router says into the wait's own slot, where the call's next look finds it.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from turncache.protocol import EngineHints
from turncache_server.connector.peers import Peer, PeerBook, PeerState

#: Calls that may wait at once. Each is looked at in every step, which costs the engine some
#: 20 microseconds and the lookup of the call's own prefix.
MAX_WAITING: Final = 32
#: What that lookup may cost in all: blocks that the waiting calls have here. One call always may.
MAX_LOCAL_BLOCKS: Final = 8192
#: Longest wait of one call, whatever its router says.
MAX_WAIT_S: Final = 120.0
#: For so long a source that has just computed the prompt is peeked at again, when it rests or
#: has to be greeted anew first; then it is the router's turn again.
GREETING_S: Final = 3.0
#: Between two such peeks; also between two peeks of any calls at a source that has just failed.
PEEK_EVERY_S: Final = 0.25
#: For so long a source that did not answer is peeked at again before its prompt counts as lost.
UNHEARD_S: Final = 0.5
#: How a wait can end: the prompt was computed again, or was ``there`` all the time, its time was
#: over, the router said no, or nobody needs it any more; ``full``: it did not begin, too many wait.
ENDS: Final = ("again", "there", "timeout", "refused", "left", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """What a call's router offers in case its prompt is lost.

    Attributes:
        call: the router's id of the call.
        wait_s: longest wait.
        above_tokens: up to so many tokens of the prompt are computed at once.
        prompt_tokens: tokens of the prompt.
    """

    call: str
    wait_s: float
    above_tokens: int
    prompt_tokens: int

    def is_worth_it(self, *, have_tokens: int, all_tokens: int, threshold_tokens: int) -> bool:
        """Say whether to wait rather than to compute.

        Args:
            have_tokens: of the prompt, here or at the source.
            all_tokens: that a source could have: full blocks.
            threshold_tokens: fewest tokens worth a pull.
        """
        missing = all_tokens - have_tokens
        if missing <= 0 or missing < threshold_tokens:
            return False  # a repeat would bring nothing that is pulled
        return self.prompt_tokens - have_tokens > self.above_tokens


def patience_of(hints: EngineHints, prompt_tokens: int) -> Patience | None:
    """Return what the hints of a call offer, None when nobody would repeat its prefill leg."""
    if not hints.repeat_s or hints.request is None or hints.source is None:
        return None
    return Patience(
        call=hints.request,
        wait_s=min(hints.repeat_s, MAX_WAIT_S),
        above_tokens=hints.repeat_above,
        prompt_tokens=prompt_tokens,
    )


class Verdict(enum.Enum):
    """What a call that waits is told when there is nobody to peek at."""

    WAIT = enum.auto()
    OVER = enum.auto()


@dataclass(slots=True, kw_only=True)
class Wait:
    """One call's wait.

    Attributes:
        until_s: when its time is over; counted from its beginning, also over several repeats.
            A repeat that is there by then is still looked for.
        local_blocks: leading blocks of its prompt that are here.
        said: what the router has said: a source, or empty for no. Written by the control
            thread, taken by the engine thread.
        source: the source that the engine thread has taken from there.
        greet_until_s: until when that one is tried.
        peek_at_s: when it is to be peeked at next.
        unheard: nothing was heard of the source that the call came with: until
            ``greet_until_s`` it is peeked at again.
        repeated: the router has named a source.
    """

    call: str
    until_s: float
    local_blocks: int = 0
    said: str | None = None
    source: str | None = None
    greet_until_s: float = 0.0
    peek_at_s: float = 0.0
    unheard: bool = False
    repeated: bool = False


class LackingCalls:
    """The calls that wait.

    Args:
        max_waiting: how many may.

    Attributes:
        ends: how many waits have ended how; see :data:`ENDS`.
    """

    def __init__(self, max_waiting: int = MAX_WAITING) -> None:
        self.ends: Counter[str] = Counter(dict.fromkeys(ENDS, 0))
        self._max_waiting = max_waiting
        self._waits: dict[str, Wait] = {}
        # When a source that rests was peeked at last, by any call.
        self._tried_at_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._waits)

    # --- the engine thread ----------------------------------------------------------------

    def begin(
        self,
        request_id: str,
        patience: Patience,
        now_s: float,
        *,
        heard: bool,
        local_blocks: int = 0,
        silent: str | None = None,
    ) -> bool:
        """Let a call wait, or go on waiting.

        Args:
            request_id: vLLM's.
            patience: for how long.
            now_s: the time.
            heard: the source has answered: it does not hold the prompt.
            local_blocks: leading blocks of its prompt that are here.
            silent: the source, if it has not answered, and may when it is asked again.

        Returns:
            False when too many do, or they have too much to look up in every step.
        """
        if (wait := self._waits.get(request_id)) is not None:
            if heard:
                wait.source = None  # lost once more: it is the router's turn
            return True
        looked_up = sum(wait.local_blocks for wait in self._waits.values())
        too_much = looked_up and looked_up + local_blocks > MAX_LOCAL_BLOCKS
        if len(self._waits) >= self._max_waiting or too_much:
            self.ends["full"] += 1
            return False
        self._waits[request_id] = Wait(
            call=patience.call,
            until_s=now_s + patience.wait_s,
            local_blocks=local_blocks,
            source=silent,
            greet_until_s=now_s + min(UNHEARD_S, patience.wait_s),
            peek_at_s=now_s,
            unheard=silent is not None,
        )
        return True

    def look(
        self,
        request_id: str,
        peers: PeerBook,
        rests: Callable[[Peer, float], bool],
        now_s: float,
    ) -> Peer | Verdict:
        """Say what a call that waits does next.

        Args:
            request_id: vLLM's.
            peers: whom it may pull from.
            rests: whether one of them has just failed, and is not asked.
            now_s: the time.

        Returns:
            Whom to peek at, or whether to wait on; after ``OVER`` there is no wait any more.
        """
        wait = self._waits[request_id]
        if (said := wait.said) is not None:
            # In this order: until both are set the router would be asked once more.
            wait.source, wait.said = said, None
            wait.unheard, wait.repeated = False, True
            wait.greet_until_s, wait.peek_at_s = now_s + GREETING_S, now_s
        # Whoever has computed it by then is peeked at, however late anybody looks.
        tried = wait.source is None or now_s >= wait.greet_until_s
        if wait.source == "" or (now_s >= wait.until_s and tried):
            self.end(request_id, "refused" if wait.source == "" else "timeout")
            return Verdict.OVER
        if wait.source is None or now_s < wait.peek_at_s:
            return Verdict.WAIT
        peer = peers.get(wait.source)
        if peer is None or now_s >= wait.greet_until_s:
            wait.source = None  # the router may have another one
            return Verdict.WAIT
        if peer.state is not PeerState.COMPATIBLE:
            wait.peek_at_s = now_s + PEEK_EVERY_S
            peers.hurry()
            return Verdict.WAIT
        if rests(peer, now_s) and not (wait.unheard and self._may_try(peer, now_s)):
            return Verdict.WAIT
        wait.peek_at_s = now_s + PEEK_EVERY_S
        return peer

    def _may_try(self, peer: Peer, now_s: float) -> bool:
        """Say whether one call may peek at a source that has just failed, for all that wait."""
        tried_at_s = self._tried_at_s.get(peer.name)
        if tried_at_s is not None and now_s < tried_at_s + PEEK_EVERY_S:
            return False
        self._tried_at_s[peer.name] = now_s
        return True

    def insists_until_s(self, request_id: str) -> float | None:
        """Return until when a source is waited for that others have given up, None for no other."""
        wait = self._waits.get(request_id)
        return wait.greet_until_s if wait is not None and wait.unheard else None

    def end(self, request_id: str, how: str) -> None:
        """End a wait, if there is one."""
        if (wait := self._waits.pop(request_id, None)) is not None:
            self.ends["there" if how == "again" and not wait.repeated else how] += 1

    # --- the control thread ---------------------------------------------------------------

    def requests(self) -> list[str]:
        """List the calls that wait for a repeat, by their router's ids; from any thread."""
        return [w.call for w in list(self._waits.values()) if w.said is None and w.source is None]

    def repeated(self, call: str, source: str) -> None:
        """Hear that a call's prefill leg was repeated, or will not be; from any thread.

        Args:
            call: the router's id of the call.
            source: who has computed the prompt, empty for nobody.
        """
        for wait in list(self._waits.values()):
            if wait.call == call:
                wait.said = source

    def counters(self) -> dict[str, float]:
        """Return how many waits have ended how; from any thread."""
        return {f"repeat_waits_{how}": float(self.ends[how]) for how in ENDS}
