"""The reader's side of the verified pull. Owner of every pull of this engine.

States of one pull, all changed by the engine thread::

    FINDING ──candidates──┐  ┌──lost──► LACKING ──no, or too late──► CLOSED
       │                  ▼  │◄─again──────┘
       │               PEEKING ──answer──► OFFERED ──blocks allocated──► READING
       │                  │                   │                             │
       │                  │                   │              failed,        ├─all ranks done─►
       └─────no use───────┴───► CLOSED ◄──────┴──────────abandoned──────────┘       VERIFYING
                                  ▲                                                     │
                                  └─────────────────── yes: handed back, no: FAILING ◄──┘

A call whose hints name its source begins with PEEKING, one whose source has to be found with
FINDING. Several candidates are peeked at once; the one that holds most is read from. A
hand-over that its source has lost, or says nothing of, waits, LACKING, where the call's router can
repeat the prefill leg (:mod:`turncache_server.connector.lacking`).

A request becomes ours in :meth:`PullBook.allocated` with external tokens above 0, never
before, and stays ours until its id has been handed back to the scheduler, aborts
included: until then its blocks may be written by the transfer. Verification sits between
"all ranks have finished reading" and "the scheduler may compute with it". Whole requests
fail, never block ids. A pull is used once; a request that comes back preempted may pull
once more, then it computes. One whose read has failed computes at once: vLLM goes on
reserving blocks for its load, so that a second one of more than half of the pool, and
everybody behind it, would wait for itself for ever.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from concurrent.futures import CancelledError, Future
from typing import Any, Final

from turncache.errors import EngineFault
from turncache.protocol import Reason
from turncache_server.connector.costs import PullCosts
from turncache_server.connector.finding import Ask, Finder, Found
from turncache_server.connector.lacking import LackingCalls, Patience, Verdict
from turncache_server.connector.peers import Peer, PeerBook, PeerState
from turncache_server.connector.pull_state import NOBODY, HandBack, Pull, PullState, Read
from turncache_server.control.messages import MAX_HASHES, PeekReply, RestBlock

logger = logging.getLogger(__name__)

#: A peek older than this at the first look is repeated: the source may have moved on.
PEEK_AGE_S: Final = 1.0
#: Pulls of one request: the first, and one more when it comes back preempted.
MAX_ATTEMPTS: Final = 2
#: After a deadline passed or a peer vanished, nothing is asked of it for this long.
PEER_REST_S: Final = 2.0
#: Longest wait for a peek from the first look. Each question has its own deadline, but
#: behind many others it may be asked late.
PEEK_WAIT_S: Final = 1.0
#: How much longer than the first candidate that holds something the others may take to answer.
GRACE_S: Final = 0.02


class PullBook:
    """Every pull of this engine.

    Args:
        peers: whom to ask.
        block_size: tokens per block.
        threshold_tokens: fewest tokens worth a pull.
        timeout_s: longest time from the first look to the end of the read, None to derive
            it from what was measured.
        costs: what computing and pulling cost; what computing is quicker for is not pulled.
        finder: looks for a source where the hints name none, None to look for none.
        lacking: the calls that wait for their prompt to be prefilled again.

    Attributes:
        finds: how many searches have ended how: ``found``, ``nothing`` or ``failed``.
    """

    def __init__(
        self,
        peers: PeerBook,
        *,
        block_size: int,
        threshold_tokens: int,
        timeout_s: float | None,
        costs: PullCosts,
        finder: Finder | None = None,
        lacking: LackingCalls | None = None,
    ) -> None:
        self.finds: Counter[str] = Counter(found=0, nothing=0, failed=0)
        self._finder = finder
        self._lacking = LackingCalls() if lacking is None else lacking
        # Of candidates that were not waited for, and when they were asked: who fails later rests.
        self._left_behind: list[tuple[Ask, float]] = []
        self._peers = peers
        self._block_size = block_size
        self._threshold_tokens = threshold_tokens
        self._timeout_s = timeout_s
        self._costs = costs
        self._pulls: dict[str, Pull] = {}
        # Those with a read under way: few, and looked at in every step.
        self._reading: dict[str, Pull] = {}
        self._reads: list[Read] = []
        self._rest_until_s: dict[str, float] = {}
        # Those among them that rest because they did not answer: until they do.
        self._silent: set[str] = set()
        self._to_fail: set[str] = set()

    def __len__(self) -> int:
        return len(self._pulls)

    def get(self, request_id: str) -> Pull | None:
        """Return a request's pull, None when it has none."""
        return self._pulls.get(request_id)

    @property
    def holding(self) -> bool:
        """Whether finished reads wait for their verification, so that hooks must run every step."""
        return any(
            p.state in (PullState.VERIFYING, PullState.FAILING) for p in self._reading.values()
        )

    @property
    def num_reading_blocks(self) -> int:
        """Destination blocks of the reads under way."""
        return sum(len(p.blocks) for p in self._reading.values())

    # --- arrival and admission ---------------------------------------------------------

    def start(
        self,
        request_id: str,
        session: str,
        source: str,
        hashes: list[bytes],
        now_s: float,
        *,
        tokens: Sequence[int] = (),
        also: tuple[str, ...] = (),
        patience: Patience | None = None,
    ) -> Reason | None:
        """Peek at the source for a request that has just arrived.

        Args:
            request_id: of the request.
            session: whose it is.
            source: engine to pull from.
            hashes: of the prompt's full blocks.
            now_s: the time.
            tokens: the prompt; without it only whole blocks are pulled.
            also: engines that are peeked at as well; who has most is pulled from.
            patience: what the call's router offers if the source has lost the prompt.

        Returns:
            Why there is no pull, None when the peek is on its way.
        """
        self._look_behind()
        names = dict.fromkeys((source, *also))
        peers = [peer for name in names if (peer := self._peers.get(name)) is not None]
        if not peers:
            return Reason.SOURCE_UNKNOWN
        if all(peer.state is PeerState.INCOMPATIBLE for peer in peers):
            return Reason.INCOMPATIBLE
        good = tuple(
            peer
            for peer in peers
            if peer.state is PeerState.COMPATIBLE and not self._rests(peer, now_s)
        )
        if not good and patience is None:
            return Reason.SOURCE_GONE
        if not hashes:
            return Reason.BELOW_THRESHOLD
        pull = Pull(
            request_id=request_id,
            session=session,
            peer=(good or peers)[0],
            hashes=hashes[:MAX_HASHES],
            tokens=tokens,
            state=PullState.PEEKING,
            patience=patience,
        )
        # Of a source that is gone the first look hears nothing, as of one that fails.
        self._ask(pull, good, now_s)
        self._pulls[request_id] = pull
        return None

    def search(
        self,
        request_id: str,
        session: str,
        hashes: list[bytes],
        now_s: float,
        *,
        tokens: Sequence[int] = (),
    ) -> Reason | None:
        """Look for a source for a request that has just arrived and names none.

        Returns:
            Why there is no pull, None when the search is on its way or there is none to make.
        """
        if self._finder is None:
            return None
        self._look_behind()
        if not hashes:
            return Reason.BELOW_THRESHOLD
        hashes = hashes[:MAX_HASHES]
        self._pulls[request_id] = Pull(
            request_id=request_id,
            session=session,
            peer=NOBODY,
            hashes=hashes,
            tokens=tokens,
            state=PullState.FINDING,
            found=self._finder.find(session, hashes, self._resting(now_s)),
            asked_at_s=now_s,
        )
        return None

    def look(self, request_id: str, local_tokens: int, now_s: float) -> int | None:
        """Say how many tokens beyond the local hit can be pulled.

        Called each time the scheduler looks at a waiting request; must not change
        anything that a second look would not change likewise.

        Returns:
            Tokens, 0 for none, None for "ask again at the next step".
        """
        pull = self._pulls.get(request_id)
        if pull is None:
            return 0
        if pull.state is PullState.LACKING and self._still_lacking(pull, now_s):
            return None
        if pull.state is PullState.CLOSED and not self._reopen(pull, now_s):
            return 0
        first = pull.first_look_s is None
        if pull.first_look_s is None:
            pull.first_look_s = now_s
        waited_s = now_s - pull.first_look_s
        if pull.state is PullState.FINDING and self._still_finding(pull, waited_s, now_s):
            return None
        if pull.state is PullState.PEEKING:
            if first and now_s - pull.asked_at_s > PEEK_AGE_S:
                self._ask(pull, tuple(ask.peer for ask in pull.asks), now_s)
            if self._still_asking(pull, waited_s, now_s):
                return None
            if pull.patience is not None and self._lacks(pull, pull.patience, local_tokens, now_s):
                return None
        return self._offer(pull, local_tokens, now_s)

    def _still_finding(self, pull: Pull, waited_s: float, now_s: float) -> bool:
        """Take the candidates when there are some, and say whether to wait on."""
        if pull.found is None or pull.found.done():
            self._take_found(pull, now_s)
            return False
        if waited_s < PEEK_WAIT_S:
            return True
        self._cancel(pull)
        self._not_found(pull, Reason.SOURCE_UNKNOWN)
        return False

    def _take_found(self, pull: Pull, now_s: float) -> None:
        try:
            found = Found() if pull.found is None else pull.found.result(timeout=0)
        except CancelledError:
            found = Found(reason=Reason.SOURCE_UNKNOWN)
        rested = tuple(ask for ask in found.asks if self._rests(ask.peer, now_s))
        for ask in rested:
            self._leave(ask, pull.asked_at_s)
        pull.asks = tuple(ask for ask in found.asks if ask not in rested)
        if pull.asks:
            pull.peer = pull.asks[0].peer
            pull.state = PullState.PEEKING
        else:
            self._not_found(pull, Reason.SOURCE_GONE if rested else found.reason)

    def _not_found(self, pull: Pull, reason: Reason | None) -> None:
        """End a search without a source; of no ``reason`` when nobody is known to have any."""
        self.finds["nothing" if reason is None else "failed"] += 1
        pull.attempts = MAX_ATTEMPTS
        pull.reason = reason
        pull.state = PullState.CLOSED

    def _still_asking(self, pull: Pull, waited_s: float, now_s: float) -> bool:
        """Take the peeks' answers when there is one, and say whether to wait on."""
        waiting = [ask for ask in pull.asks if not ask.reply.done()]
        # Behind a peer that has just failed others nobody waits any longer, but who finds that out.
        insists_until_s = self._lacking.insists_until_s(pull.request_id)
        if insists_until_s is None:
            hopeful = any(not self._rests(ask.peer, now_s) for ask in waiting)
            goes_on = hopeful and waited_s < PEEK_WAIT_S
        else:
            goes_on = bool(waiting) and now_s < insists_until_s
        if goes_on and not self._is_enough(pull, now_s):
            return True
        if pull.asks and len(waiting) == len(pull.asks):
            self._cancel(pull)
            self._refuse(pull, Reason.TIMEOUT)
        else:
            self._take_answers(pull, now_s)
        self._count_search(pull)
        return False

    def _is_enough(self, pull: Pull, now_s: float) -> bool:
        """Whether a candidate holds something and the others have had their grace."""
        if pull.useful_at_s is None and any(_is_useful(ask.reply) for ask in pull.asks):
            pull.useful_at_s = now_s
        return pull.useful_at_s is not None and now_s - pull.useful_at_s >= GRACE_S

    def _count_search(self, pull: Pull) -> None:
        if pull.found is None:
            return
        pull.found = None  # what comes later is no search
        if pull.answer is None:
            self.finds["failed"] += 1
        else:
            self.finds["found" if pull.answer.block_ids else "nothing"] += 1

    def _lacks(self, pull: Pull, patience: Patience, local_tokens: int, now_s: float) -> bool:
        """Say whether the prompt is lost, and the call waits for it to be prefilled again."""
        held = 0 if pull.answer is None else len(pull.answer.block_ids)
        if 0 < pull.known_blocks <= held:
            lost = False  # the source has all that it ever had: its prompt was another one
        else:
            lost = patience.is_worth_it(
                have_tokens=max(local_tokens, held * self._block_size),
                all_tokens=pull.upto(len(pull.hashes), self._block_size),
                threshold_tokens=self._threshold_tokens,
            )
        if not lost:
            self._lacking.end(pull.request_id, "again")
            return False
        heard = pull.answer is not None
        peer = self._peers.get(pull.peer.name)
        may_answer = not heard and peer is not None and peer.state is not PeerState.INCOMPATIBLE
        if not self._lacking.begin(
            pull.request_id,
            patience,
            now_s,
            heard=heard,
            local_blocks=local_tokens // self._block_size,
            silent=pull.peer.name if may_answer else None,
        ):
            pull.patience = None
            return False
        pull.state = PullState.LACKING
        return True

    def _still_lacking(self, pull: Pull, now_s: float) -> bool:
        """Say whether to wait on; else there is somebody to peek at, or the wait is over."""
        next_ = self._lacking.look(pull.request_id, self._peers, self._rests, now_s)
        if next_ is Verdict.WAIT:
            return True
        # The time for the pull begins here: the wait was no part of it.
        pull.first_look_s = now_s
        if isinstance(next_, Peer):
            pull.attempts = 1
            pull.reason = None
            pull.peer = next_
            self._ask(pull, (next_,), now_s)
            return False
        pull.patience = None
        if pull.answer is not None and pull.answer.block_ids:
            # A part was there when the wait began, and may be there still.
            self._ask(pull, (pull.peer,), now_s)
        else:
            self._refuse(pull, pull.reason)
        return False

    def _offer(self, pull: Pull, local_tokens: int, now_s: float) -> int:
        if pull.state is not PullState.OFFERED or pull.answer is None:
            return 0
        held = len(pull.answer.block_ids)
        tokens = pull.upto(held, self._block_size, pull.rest) - local_tokens
        if tokens <= 0:
            return 0
        if tokens < self._threshold_tokens:
            pull.reason = Reason.BELOW_THRESHOLD
            return 0
        if pull.offered_at_s is None and self._costs.is_dearer(local_tokens, tokens):
            self._refuse(pull, Reason.DEARER)
            return 0
        if self._rests(pull.peer, now_s):
            # It has just failed others: what it holds may not arrive.
            self._refuse(pull, Reason.SOURCE_GONE)
            return 0
        if pull.offered_at_s is None:
            pull.offered_at_s = now_s
        if now_s - pull.offered_at_s >= self.timeout_s(local_tokens, tokens):
            # Loads are admitted by stricter rules than computing: an offer for which there
            # was no room all this time must not keep the request, and all behind it.
            self._refuse(pull, Reason.TIMEOUT)
            return 0
        pull.local_blocks = local_tokens // self._block_size
        return tokens

    def allocated(
        self,
        request: Any,
        blocks: Sequence[Any],
        external_tokens: int,
        block_map: Any,
        now_s: float,
    ) -> None:
        """Take a request over: the scheduler has allocated blocks for what we offered.

        From here on the scheduler waits for the request's id. So one that cannot be read
        for (the mode was switched while blocks were allocated) fails like a read.
        """
        pull = self._pulls.get(request.request_id)
        read = None
        if pull is not None and pull.state is PullState.OFFERED:
            read = self._begin(pull, request, blocks, external_tokens, now_s)
        if pull is None or read is None:
            self._to_fail.add(request.request_id)
            return
        pull.block_map = block_map
        self._reads.append(read)

    def _begin(
        self,
        pull: Pull,
        request: Any,
        blocks: Sequence[Any],
        external_tokens: int,
        now_s: float,
    ) -> Read | None:
        answer, hello = pull.answer, pull.peer.hello
        if answer is None or hello is None:
            return None
        size, first = self._block_size, pull.local_blocks
        remote = answer.block_ids if pull.rest is None else [*answer.block_ids, pull.rest.block_id]
        end = pull.upto(len(answer.block_ids), size, pull.rest)
        count = -(-end // size) - first
        if first * size + external_tokens != end or count <= 0 or len(blocks) < first + count:
            return None
        pull.state = PullState.READING
        pull.patience = None
        self._reading[pull.request_id] = pull
        pull.began = True
        pull.reason = None
        pull.request = request
        pull.blocks = list(blocks[first : first + count])
        started_s = now_s if pull.first_look_s is None else pull.first_look_s
        pull.reading_at_s = now_s
        timeout_s = self.timeout_s(first * size, external_tokens)
        deadline_s = timeout_s - (now_s - started_s)
        return Read(
            request_id=pull.request_id,
            attempt=pull.attempts,
            request=request,
            local_blocks=[block.block_id for block in pull.blocks],
            remote_blocks=remote[first : first + count],
            num_local_hit_blocks=first,
            engine_id=hello.engine_id,
            host=hello.nixl_host,
            port=hello.nixl_port,
            tp_size=hello.tp_size,
            num_tokens=external_tokens,
            deadline_s=max(0.1, deadline_s),
        )

    def timeout_s(self, start: int, tokens: int) -> float:
        """Return the longest time for a pull of ``tokens`` after the first ``start``."""
        if self._timeout_s is not None:
            return self._timeout_s
        return self._costs.deadline_s(start, tokens)

    def take_reads(self) -> list[Read]:
        """Return the reads that the workers have not been told of."""
        reads, self._reads = self._reads, []
        return reads

    def take_failures(self) -> set[str]:
        """Return the requests that the workers are to report as finished and failed."""
        failures, self._to_fail = self._to_fail, set()
        return failures

    # --- completion ----------------------------------------------------------------------

    def completed(
        self, finished: Collection[str], failed: Collection[str], block_map: Any, now_s: float
    ) -> HandBack:
        """Process what the workers finished, and the verifications that have ended.

        Args:
            finished: ids that all ranks have finished receiving.
            failed: those among them whose load failed on some rank.
            block_map: the own prefix-cache map.

        Returns:
            Ids to take out of the scheduler's finished set and ids to put into it.
        """
        back = HandBack()
        for request_id in finished:
            pull = self._pulls.get(request_id)
            if pull is None or pull.state not in (PullState.READING, PullState.FAILING):
                continue
            if request_id in failed:
                self._failed(pull, now_s)
            elif pull.aborted:
                self._close(pull)
            else:
                pull.state = PullState.VERIFYING
                pull.verify = self._peers.verify(pull.peer, pull.question())
                back.hold.add(request_id)
        for pull in [p for p in self._reading.values() if p.state is PullState.VERIFYING]:
            if pull.request_id not in back.hold:
                self._settle(pull, back, block_map, now_s)
        return back

    def _failed(self, pull: Pull, now_s: float) -> None:
        pull.attempts = MAX_ATTEMPTS
        if pull.reason is None:
            # The workers report a deadline and a transport error alike.
            pull.reason = Reason.TIMEOUT
            self._rest(pull.peer, now_s)
            self._peers.hurry()
        self._close(pull)

    def _settle(self, pull: Pull, back: HandBack, block_map: Any, now_s: float) -> None:
        """Hand a verified id back, or order its failure; an aborted one just goes back."""
        if pull.aborted:
            back.add.add(pull.request_id)
            self._close(pull)
            return
        if pull.verify is not None and not pull.verify.done():
            return
        valid, rest = self._verified(pull, now_s)
        if pull.block_map is not block_map:
            valid, rest = 0, None
        size, first = self._block_size, pull.local_blocks
        if valid < len(pull.blocks) - (pull.rest is not None) and pull.reason is None:
            pull.reason = Reason.EVICTED
        end = pull.upto(first + valid, size, rest)
        pull.returned_tokens = end - first * size
        if pull.returned_tokens <= 0:
            if pull.reason is None:
                pull.reason = Reason.EVICTED  # a rest alone: its source is well all the same
            # A verified prefix of nothing cannot be expressed by cutting the computed
            # count (vLLM asserts on it with a local hit): the workers report a failure.
            pull.state = PullState.FAILING
            self._to_fail.add(pull.request_id)
            return
        if pull.first_look_s is not None:
            pull.pull_s = now_s - pull.first_look_s
        if pull.answer is not None:
            num_tokens = len(pull.blocks) * size
            self._costs.pulled(pull.answer.start_id, num_tokens, now_s - pull.reading_at_s)
        pull.request.num_computed_tokens = end
        back.add.add(pull.request_id)
        back.num_verified += 1
        back.num_rests += end % size > 0
        back.transfer_s.append(now_s - pull.reading_at_s)
        back.num_blocks += -(-end // size) - first
        back.loaded_blocks.extend(block.block_id for block in pull.blocks[: end // size - first])
        self._close(pull)

    def _verified(self, pull: Pull, now_s: float) -> tuple[int, RestBlock | None]:
        """Return how many of the full blocks that were read the source confirms, and the rest."""
        if pull.verify is None:
            return 0, None
        try:
            reply = pull.verify.result(timeout=0)
        except (EngineFault, CancelledError) as error:
            logger.warning("turncache: verify failed, recomputing: %s", error)
            pull.reason = Reason.SOURCE_GONE
            self._rest(pull.peer, now_s)
            return 0, None
        num_full = len(pull.blocks) - (pull.rest is not None)
        valid = max(0, min(reply.valid, num_full))
        return valid, pull.rest if reply.rest and valid == num_full else None

    def fail_unverified(self, finished: Collection[str], failed: Collection[str]) -> None:
        """Have every read that has ended recomputed, for a hook that failed itself.

        Whatever was not confirmed by its source must not be computed with.
        """
        unverified = set(finished) - set(failed)
        unverified |= {
            p.request_id for p in self._reading.values() if p.state is PullState.VERIFYING
        }
        self._to_fail |= unverified
        for request_id in unverified:
            if (pull := self._pulls.get(request_id)) is not None:
                pull.state = PullState.FAILING

    def ended(self, request_id: str) -> Pull | None:
        """Note that a request has ended (answered or aborted).

        A pull whose transfer may still write stays until its id has been handed back.
        """
        pull = self._pulls.get(request_id)
        if pull is None:
            return None
        if pull.state in (PullState.READING, PullState.VERIFYING, PullState.FAILING):
            pull.aborted = True
        else:
            self._lacking.end(request_id, "left")
            self._cancel(pull)
            del self._pulls[request_id]
        return pull

    def give_up(self) -> None:
        """Offer nothing any more; what is being read runs to its end (mode off)."""
        unread = (PullState.FINDING, PullState.PEEKING, PullState.LACKING, PullState.OFFERED)
        for pull in list(self._pulls.values()):
            if pull.state in unread:
                self._lacking.end(pull.request_id, "left")
                self._cancel(pull)
                pull.reason = Reason.DISABLED
                pull.attempts = MAX_ATTEMPTS
                pull.state = PullState.CLOSED

    # --- inside ----------------------------------------------------------------------------

    def _rests(self, peer: Peer, now_s: float) -> bool:
        return self._rest_until_s.get(peer.name, now_s) > now_s

    def _rest(self, peer: Peer, since_s: float, *, silent: bool = False) -> None:
        """Leave a peer alone for a while; one that was only silent, until it answers."""
        if not silent:
            self._silent.discard(peer.name)
        elif not self._rests(peer, since_s):
            self._silent.add(peer.name)
        until_s = since_s + PEER_REST_S
        self._rest_until_s[peer.name] = max(until_s, self._rest_until_s.get(peer.name, until_s))

    def _resting(self, now_s: float) -> frozenset[str]:
        return frozenset(name for name, until_s in self._rest_until_s.items() if until_s > now_s)

    def _ask(self, pull: Pull, peers: tuple[Peer, ...], now_s: float) -> None:
        self._cancel_peeks(pull)
        pull.asks = tuple(
            Ask(peer, self._peers.peek(peer, pull.session, pull.hashes)) for peer in peers
        )
        pull.asked_at_s = now_s
        pull.offered_at_s = pull.useful_at_s = None
        pull.answer = pull.rest = None
        pull.state = PullState.PEEKING

    def _take_answers(self, pull: Pull, now_s: float) -> None:
        """Turn the best answer into an offer, or close the pull with a reason."""
        asks, pull.asks = pull.asks, ()
        best: tuple[Peer, PeekReply] | None = None
        most = -1
        known = 0
        for ask in asks:
            if not ask.reply.done():
                self._leave(ask, pull.asked_at_s)
                continue
            answer = self._answer(ask, len(pull.hashes), now_s)
            if answer is None:
                self._peers.hurry()
                continue
            known = max(known, answer[1].known)
            rest = pull.fitting(answer[1], self._block_size)
            tokens = pull.upto(len(answer[1].block_ids), self._block_size, rest)
            if tokens > most:
                best, most, pull.rest = answer, tokens, rest
        if best is None:
            self._refuse(pull, Reason.SOURCE_GONE)
            return
        pull.peer, pull.answer = best
        pull.known_blocks = known
        pull.state = PullState.OFFERED
        if not pull.answer.block_ids and known:
            pull.reason = Reason.EVICTED

    def _answer(self, ask: Ask, num_hashes: int, now_s: float) -> tuple[Peer, PeekReply] | None:
        """Return an answer with the peer that gave it, as its last hello left it."""
        try:
            answer = ask.reply.result(timeout=0)
        except (EngineFault, CancelledError) as error:
            logger.warning("turncache: peek failed: %s", error)
            self._rest(ask.peer, now_s, silent=True)
            return None
        if ask.peer.name in self._silent:
            self._silent.discard(ask.peer.name)
            self._rest_until_s.pop(ask.peer.name, None)
        if not len(answer.block_ids) == len(answer.epochs) <= num_hashes:
            logger.error(
                "turncache: peer %s answered a peek of %d hashes with %d blocks and %d epochs",
                ask.peer.name,
                num_hashes,
                len(answer.block_ids),
                len(answer.epochs),
            )
            return None
        peer = self._peers.get(ask.peer.name)
        if (
            peer is None
            or peer.hello is None
            or peer.state is not PeerState.COMPATIBLE
            or not peer.hello.is_of(answer)
        ):
            # Restarted or reset since its fingerprint was compared: a new hello first.
            return None
        return peer, answer

    def _leave(self, ask: Ask, asked_at_s: float) -> None:
        """Wait for a candidate no longer, but hear whether it fails."""
        if not ask.reply.cancel():
            self._left_behind.append((ask, asked_at_s))

    def _look_behind(self) -> None:
        """Let candidates that have failed after all rest: they hold threads up meanwhile.

        From when they were asked: that they failed may be heard much later.
        """
        for left in [left for left in self._left_behind if left[0].reply.done()]:
            self._left_behind.remove(left)
            ask, asked_at_s = left
            if not ask.reply.cancelled() and ask.reply.exception(timeout=0) is not None:
                self._rest(ask.peer, asked_at_s, silent=True)

    def _refuse(self, pull: Pull, reason: Reason | None) -> None:
        pull.reason = reason
        pull.attempts = MAX_ATTEMPTS
        pull.state = PullState.CLOSED

    def _reopen(self, pull: Pull, now_s: float) -> bool:
        """Pull once more for a request that came back."""
        if pull.attempts >= MAX_ATTEMPTS or self._rests(pull.peer, now_s):
            return False
        fresh = self._peers.get(pull.peer.name)
        if fresh is None or fresh.state is not PeerState.COMPATIBLE:
            return False
        pull.attempts += 1
        pull.peer = fresh
        pull.first_look_s = now_s
        pull.returned_tokens = 0
        pull.reason = None
        self._ask(pull, (fresh,), now_s)
        return True

    def _close(self, pull: Pull) -> None:
        pull.state = PullState.CLOSED
        self._reading.pop(pull.request_id, None)
        pull.blocks, pull.block_map, pull.request, pull.verify = (), None, None, None
        if pull.aborted:
            self._pulls.pop(pull.request_id, None)

    def _cancel(self, pull: Pull) -> None:
        """End the search and the peeks."""
        found = pull.found
        # Of a search that is just sending its peeks off nobody hears any more.
        if found is not None and not found.cancel() and pull.state is PullState.FINDING:
            pull.asks = found.result(timeout=0).asks if found.done() else ()
        self._cancel_peeks(pull)

    def _cancel_peeks(self, pull: Pull) -> None:
        for ask in pull.asks:
            self._leave(ask, pull.asked_at_s)
        pull.asks = ()


def _is_useful(reply: Future[PeekReply]) -> bool:
    """Whether a candidate has answered that it holds something."""
    if not reply.done() or reply.cancelled() or reply.exception(timeout=0) is not None:
        return False
    return bool(reply.result(timeout=0).block_ids)
