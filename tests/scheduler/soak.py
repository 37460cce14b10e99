"""Two engines that pull from each other, driven at random: nothing may ever be computed wrong.

Everything that happens is drawn from one seed: calls of agents whose histories grow, are
edited and forked, or that repeat a few prompts in a pool that hardly holds one; steps,
scheduled, executed and processed on their own; prompts that a proxy hands over as stock, in any
mode; prompts that are lost before they were pulled, and a router that has them computed again,
refuses, or names a stranger; sessions looked for in a directory that is late, silent or wrong;
half blocks on the wire, late, failed or lingering; answers of the control thread, at any moment
of the other engine's life, in the middle of a schedule and between two reads of one answer;
aborts, resets, modes, and time.
Wrong KV is noticed where it is used (:mod:`tests.builders`).
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from vllm.v1.request import Request

from tests.builders import BLOCK, VOCAB, Engine, Question, Transfer, World
from tests.fakes.directory import SlowDirectory
from turncache.errors import EngineFault
from turncache_server.connector.source import Source
from turncache_server.retention.ledger import Ledger
from turncache_server.retention.mailbox import SwitchMode

NAMES = ("prefill-0", "decode-0")
#: What a proxy asks the first of two engines for.
HOLD: Final = MappingProxyType({"do_remote_decode": True, "do_remote_prefill": False})


@dataclass(eq=False)
class Agent:
    """A session and what became of its last call."""

    session: str
    history: list[int]
    engine: str = NAMES[0]
    request: Any = None


@dataclass
class Events:
    """What a run has seen; a soak that sees none of a kind tests nothing of it."""

    calls: int = 0
    pulls_verified: int = 0
    pulls_failed: int = 0
    pulled_rests: int = 0
    reads_abandoned: int = 0
    aborts: int = 0
    preemptions: int = 0
    resets: int = 0
    named_blocks: int = 0
    torn_reads: int = 0
    inside_schedule: int = 0
    stock_handovers: int = 0
    waits: int = 0
    helped: int = 0
    repeats: int = 0
    finds: int = 0
    found: int = 0

    def add(self, other: Events) -> None:
        """Add the counts of another run."""
        for name, count in vars(other).items():
            setattr(self, name, getattr(self, name) + count)


class _Torn:
    """A list of the ledger as the control thread reads it, interrupted by the engine thread."""

    def __init__(self, values: list[int], interrupt: Callable[[], None]) -> None:
        self._values = values
        self._interrupt = interrupt

    def __getitem__(self, index: int) -> int:
        self._interrupt()
        return self._values[index]

    def __len__(self) -> int:
        return len(self._values)


class _TornLedger:
    """The ledger as the control thread reads it."""

    def __init__(self, ledger: Ledger, interrupt: Callable[[], None]) -> None:
        self._ledger = ledger
        self.epoch = _Torn(ledger.epoch, interrupt)
        self.written = _Torn(ledger.written, interrupt)

    @property
    def in_order(self) -> bool:
        return self._ledger.in_order

    def readable_epoch(self, block_id: int) -> int | None:
        # The real order of reads, on lists that are interrupted.
        return type(self._ledger).readable_epoch(self, block_id)  # type: ignore[arg-type]


class Soak:
    """One run.

    Args:
        seed: of everything.
        mutant: switches one rule off in an engine, None for the real ones.
        stock: some prompts are handed over by vLLM's own logic.
        finding: calls that name no source have it looked for.
        repeating: calls whose prompt is lost may wait for it to be computed again.
    """

    def __init__(
        self,
        seed: int,
        *,
        mutant: Callable[[Engine], None] | None = None,
        stock: bool = False,
        finding: bool = False,
        repeating: bool = False,
    ) -> None:
        # Of its own, so that a seed means the same with and without.
        self._stock = random.Random(seed) if stock else None
        self._finding = random.Random(seed) if finding else None
        self._repeating = random.Random(seed) if repeating else None
        self._held: Request | None = None
        self.random = random.Random(seed)
        self.world = World(seed=seed, hold=True)
        self.events = Events()
        asynchronous = self.random.random() < 0.5
        # In a tight pool a block is soon handed out again, and for the same tokens: whatever
        # goes by hashes alone is wrong there.
        self.tight = seed % 2 == 1
        num_blocks = self.random.choice([8, 10, 12] if self.tight else [24, 40, 64])
        self.engines = [
            Engine(
                self.world,
                name,
                peers=[other for other in NAMES if other != name],
                directory=SlowDirectory() if finding else None,
                settings={"pull_timeout_s": 2.0, "retain_default_s": 30, "handover_s": 5},
                num_blocks=num_blocks,
                batched_tokens=self.random.choice([16, 48, 128]),
                max_requests=6,
                max_model_len=(num_blocks - 1) * BLOCK,
                async_scheduling=asynchronous,
                num_ranks=self.random.choice([1, 1, 2]),
            )
            for name in NAMES
        ]
        # A source that is found to have been reset is greeted in time, or not.
        greets = random.Random(f"greets {seed}").random() < 0.8
        for engine in self.engines:
            assert engine.peers is not None
            engine.peers.greets = greets
        first, second = (len(engine.workers) for engine in self.engines)
        if first != second:
            # vLLM's own notices of unequal sizes are not on this wire.
            self._stock = None
        self.longest = (num_blocks - 3 if self.tight else num_blocks // 2) * BLOCK
        self._inside: str | None = None
        for engine in self.engines:
            self._instrument(engine)
            if mutant is not None:
                mutant(engine)
        shared = self._new_tokens(3 * BLOCK)
        self.agents = [Agent(f"s{i}", list(shared) if i % 2 else []) for i in range(5)]
        self.hot = [self._new_tokens(self.longest - BLOCK) for _ in range(2)]

    # --- the control thread between two instructions of the engine thread --------------------

    def _instrument(self, engine: Engine) -> None:
        extension = engine.extension
        extension.source = Source(
            engine.pool,
            _TornLedger(extension.ledger, lambda: self._interrupted(engine)),  # type: ignore[arg-type]
            extension.mailbox,
            serving=lambda: extension.acting and extension.ledger.in_order,
            known_blocks=extension.table.known_blocks,
            awaits=extension.table.awaits,
            rests=extension.rests,
        )
        manager, connector = engine.scheduler.kv_cache_manager, engine.scheduler.connector
        scheduler = engine.scheduler
        scheduler._preempt_request = self._counted(scheduler._preempt_request)
        for owner, name in (
            (manager, "allocate_slots"),
            (connector, "build_connector_meta"),
            (connector, "update_connector_output"),
            (connector, "take_events"),
        ):
            setattr(owner, name, self._watched(engine, getattr(owner, name)))

    def _counted(self, preempt: Callable[..., None]) -> Callable[..., None]:
        def run(*args: Any, **kwargs: Any) -> None:
            self.events.preemptions += 1
            preempt(*args, **kwargs)

        return run

    def _watched(self, engine: Engine, hook: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            self._look(engine)
            result = hook(*args, **kwargs)
            self._look(engine)
            return result

        return run

    def _look(self, engine: Engine) -> None:
        """Answer what is asked of an engine while it is in the middle of a step."""
        before, self._inside = self._inside, engine.name
        self.events.named_blocks += engine.check_named()
        for question in self._questions(engine.name):
            if self.random.random() < 0.3:
                self.events.inside_schedule += 1
                self._answer(question)
        self._inside = before

    def _interrupted(self, engine: Engine) -> None:
        """Let the engine thread run on between two reads of the control thread."""
        if self._inside is None and self.random.random() < (0.1 if self.tight else 0.02):
            self.events.torn_reads += 1
            with self._busy(engine):
                for _ in range(self.random.randint(1, 12 if self.tight else 4)):
                    if self.tight and self.random.random() < 0.2:
                        self._call(self.random.choice(self.agents), engine)
                    self._step(engine)

    @contextmanager
    def _busy(self, engine: Engine) -> Iterator[None]:
        before, self._inside = self._inside, engine.name
        yield
        self._inside = before

    # --- what can happen ---------------------------------------------------------------------

    def run(self, num_events: int) -> Events:
        """Let things happen, then bring everything to its end."""
        kinds: list[tuple[int, Callable[[], None]]] = [
            (24, self.some_step),
            (5, self.some_call),
            (12, self.some_answer),
            (10, self.some_transfer),
            (1, self.some_abort),
            (2, self.some_time),
        ]
        weights = [weight for weight, _ in kinds]
        for number in range(num_events):
            _, event = self.random.choices(kinds, weights)[0]
            event()
            if self._stock is not None and self._stock.random() < 0.04:
                self.some_handover(self._stock)
            if self._finding is not None and self._finding.random() < 0.15:
                self.some_find(self._finding)
            if self._repeating is not None and self._repeating.random() < 0.3:
                self.some_repeat(self._repeating)
            if number % 50 == 49:
                self.rare_event()
            for engine in self.engines:
                engine.check_free()
                self.events.named_blocks += engine.check_named()
        self.drain()
        return self.events

    def some_step(self) -> None:
        """One engine schedules, executes or processes."""
        self._step(self.random.choice(self.engines))

    def _step(self, engine: Engine) -> None:
        waiting = [flight for flight in engine.flights if flight.output is None]
        choice = self.random.random()
        if choice < 0.2 and waiting:
            engine.execute(waiting[0])
        elif len(engine.flights) < engine.depth and engine.scheduler.has_requests():
            engine.schedule()
        elif engine.flights:
            engine.process()

    def some_call(self) -> None:
        """An agent that waits makes its next call, somewhere."""
        idle = [agent for agent in self.agents if agent.request is None]
        for agent in self.agents:
            if agent.request is not None and agent.request.is_finished():
                self._returned(agent)
        if not idle:
            return
        agent = self.random.choice(idle)
        if self.random.random() < 0.7:
            agent.engine = NAMES[agent.engine == NAMES[0]]
        engine = self.world.engines[agent.engine]
        agent.request = self._call(agent, engine)
        if self.random.random() < 0.3:
            # Beside it, on the other engine: a retry, a fork, the second leg of a pair.
            other = self.world.engines[NAMES[engine.name == NAMES[0]]]
            self._add(agent, other, [*agent.history, *self._new_tokens(BLOCK)])

    def _call(self, agent: Agent, engine: Engine) -> Any:
        """Make an agent's next call."""
        if self.tight:
            agent.history = list(self.random.choice(self.hot))
        else:
            self._edit(agent)
        most = BLOCK if self.tight else 4 * BLOCK
        agent.history += self._new_tokens(self.random.randint(1, most))
        if len(agent.history) > self.longest:
            agent.history = self._new_tokens(2 * BLOCK)
        return self._add(agent, engine, agent.history)

    def _add(self, agent: Agent, engine: Engine, prompt: list[int]) -> Any:
        self.events.calls += 1
        named = 0.8 if self._finding is None else 0.3
        return engine.add(
            f"call-{self.events.calls}",
            prompt,
            max_tokens=self.random.choice([1, 1, 2, BLOCK if self.tight else 3 * BLOCK]),
            session=agent.session,
            source=NAMES[engine.name == NAMES[0]] if self.random.random() < named else None,
            handover=not self.tight and self.random.random() < 0.3,
            final=self.random.random() < 0.02,
            retain_s=0.0 if self.tight else self.random.choice([None, 0.0, 5.0]),
            **self._patience(),
        )

    def _patience(self) -> dict[str, Any]:
        draw = self._repeating
        if draw is None or draw.random() < 0.2:
            return {}
        return {
            "repeat_s": draw.choice([0.3, 3.0, 30.0]),
            "repeat_above": draw.choice([0, 0, 2 * BLOCK]),
        }

    def some_repeat(self, draw: random.Random) -> None:
        """A router hears of a call that waits: it has the prompt computed, or says who did."""
        waiting = [(e, call) for e in self.engines for call in e.lacking.requests()]
        if not waiting:
            return
        engine, call = draw.choice(waiting)
        other = self.world.engines[NAMES[engine.name == NAMES[0]]]
        choice = draw.random()
        if choice < 0.4:
            # Told before it is through, now and then before it has begun.
            prompt = list(engine.scheduler.requests[call].prompt_token_ids or ())
            self.events.calls += 1
            other.add(
                f"again-{self.events.calls}",
                prompt,
                session=self.agents[0].session,
                handover=True,
                retain_s=0.0,
            )
        elif choice < 0.95:
            engine.lacking.repeated(call, other.name)
        else:
            engine.lacking.repeated(call, draw.choice(["", "stranger", engine.name]))
        self.events.repeats += 1

    def some_handover(self, draw: random.Random) -> None:
        """A prompt begins to be handed over as stock, or its second leg does.

        One at a time: its blocks are held until then, and two pools could wait for each other.
        """
        if self._held is not None:
            self._take_over(draw.random() < 0.9)
            return
        agent, engine = draw.choice(self.agents), draw.choice(self.engines)
        if agent.history:
            self._held = self._leg(engine, agent.session, agent.history, HOLD)

    def _take_over(self, wanted: bool) -> None:
        """Begin the second leg when the first has answered; else it is for stock to notice."""
        held = self._held
        if held is None or not held.is_finished():
            return
        (first,) = (each for each in self.engines if held.request_id in each.texts)
        (other,) = (each for each in self.engines if each is not first)
        params = first.said.get(held.request_id)
        self._held = None
        if params is not None and params["remote_block_ids"]:
            self.events.stock_handovers += 1
            prompt = list(held.prompt_token_ids or ())
            leg = self._leg(other, held.request_id, prompt, params)
            if not wanted:
                other.abort(leg.request_id)

    def _leg(self, engine: Engine, session: str, prompt: list[int], params: Any) -> Request:
        self.events.calls += 1
        return engine.add(
            f"call-{self.events.calls}",
            prompt,
            max_tokens=1 if params is HOLD else BLOCK,
            session=session,
            stock=True,
            extra_args={"kv_transfer_params": dict(params)},
        )

    def some_find(self, draw: random.Random) -> None:
        """A directory answers a search: right, wrong, with nothing, or not at all."""
        directories = [d for d in self._directories if d.open]
        if not directories:
            return
        directory = draw.choice(directories)
        draw.shuffle(directory.open)
        choice = draw.random()
        if choice < 0.05:
            directory.open.pop(0)  # never
        elif choice < 0.15:
            directory.answer(EngineFault("redis", "no answer"))
        else:
            answers = [[*NAMES], [*NAMES], ["stranger"], [], ["", *reversed(NAMES), NAMES[0]]]
            directory.answer(draw.choice(answers))
        self.events.finds += 1

    @property
    def _directories(self) -> list[SlowDirectory]:
        return [e.directory for e in self.engines if isinstance(e.directory, SlowDirectory)]

    def _returned(self, agent: Agent) -> None:
        if self.random.random() < 0.9:
            agent.history = list(agent.request.all_token_ids)
        agent.request = None

    def _edit(self, agent: Agent) -> None:
        """Sometimes a history is cut, edited, or continued by another session."""
        choice = self.random.random()
        if choice < 0.05 and agent.history:
            at = self.random.randrange(len(agent.history))
            agent.history[at] = 2 + self.random.randrange(VOCAB - 2)
        elif choice < 0.1:
            agent.history = agent.history[: self.random.randint(0, len(agent.history))]
        elif choice < 0.2:
            agent.history = list(self.random.choice(self.agents).history)

    def _new_tokens(self, count: int) -> list[int]:
        return [2 + self.random.randrange(VOCAB - 2) for _ in range(count)]

    def _questions(self, peer: str) -> list[Question]:
        return [
            question
            for engine in self.engines
            if engine.peers is not None
            for question in engine.peers.questions
            if question.peer == peer and question.reply is None
        ]

    def _answer(self, question: Question) -> None:
        for engine in self.engines:
            if engine.peers is not None and question in engine.peers.questions:
                engine.peers.answer(question)

    def some_answer(self) -> None:
        """A question is answered, delivered, or lost."""
        engine = self.random.choice(self.engines)
        if engine.peers is None or not engine.peers.questions:
            return
        question = self.random.choice(engine.peers.questions)
        choice = self.random.random()
        if choice < 0.005:
            engine.peers.lose(question, EngineFault(question.peer, "no answer"))
        elif choice < 0.4:
            engine.peers.answer(question)
        else:
            engine.peers.deliver(question)

    def some_transfer(self) -> None:
        """Half blocks arrive; a read fails, with or without the backend still writing."""
        live = [each for each in self.world.transfers if not each.released]
        self.world.transfers[:] = live
        if not live:
            return
        transfer: Transfer = self.random.choice(live)
        choice = self.random.random()
        if choice < 0.01 and not transfer.stock:
            # Of a stock hand-over nothing but a lease would then let the source's blocks go.
            transfer.fail(still_writing=self.random.random() < 0.5)
        elif choice < 0.03 and transfer.state == "ERR":
            transfer.stop_writing()
        elif choice < 0.6:
            transfer.advance(self.random.randint(1, 6))
        else:
            transfer.advance()

    def some_abort(self) -> None:
        """A client leaves."""
        engine = self.random.choice(self.engines)
        live = [r for r, q in engine.scheduler.requests.items() if not q.is_finished()]
        if live and self.random.random() < 0.4:
            self.events.aborts += 1
            engine.abort(self.random.choice(live))

    def some_time(self) -> None:
        """Time passes, now and then more than a deadline."""
        self.world.now_s += self.random.choices([0.01, 0.1, 0.5, 2.5], [4, 4, 4, 1])[0]

    def rare_event(self) -> None:
        """A reset of the prefix cache, a switch of the mode, a peer that is greeted anew."""
        engine = self.random.choice(self.engines)
        choice = self.random.random()
        if choice < 0.3:
            self.events.resets += bool(engine.scheduler.reset_prefix_cache())
        elif choice < 0.4:
            engine.extension.mailbox.post(SwitchMode(self.random.choice(["off", "observe"])))
        else:
            engine.extension.mailbox.post(SwitchMode("on"))

    # --- the end -----------------------------------------------------------------------------

    def drain(self) -> None:
        """Let every transfer and question end, and every request with them; nothing is left."""
        for _ in range(600):
            self._take_over(wanted=True)
            for transfer in self.world.transfers:
                if not transfer.released and transfer.state == "ERR":
                    transfer.stop_writing()
                elif not transfer.released:
                    transfer.advance()
            self._end_searches()
            self._end_waits()
            for engine in self.engines:
                if engine.peers is not None:
                    for question in list(engine.peers.questions):
                        engine.peers.deliver(question)
                engine.step()
            if self._quiet and not self._withheld():
                break
            if self._quiet:
                self._wake()
        for engine in self.engines:
            pair = engine.connector.connector_scheduler
            self.events.pulls_verified += pair.totals["pulls_verified"]
            self.events.pulls_failed += pair.totals["pulls_failed"]
            self.events.pulled_rests += pair.totals["pulled_rests"]
            self.events.reads_abandoned += pair.totals["reads_abandoned"]
            self.events.found += engine.pulls.finds["found"]
            self.events.waits += sum(engine.lacking.ends.values())
            self.events.helped += engine.lacking.ends["again"]
            assert engine.extension.broken is None, engine.extension.broken
            assert engine.extension.ledger.in_order
            engine.assert_no_leak()

    def _end_searches(self) -> None:
        """Have directories answer; of those that never did time tells."""
        for directory in self._directories:
            directory.says = NAMES
            while directory.open:
                directory.answer(NAMES)
            self.world.now_s += 0.02

    def _end_waits(self) -> None:
        """Nobody repeats anything any more; of whom nobody says it, time tells."""
        for engine in self.engines:
            for call in engine.lacking.requests()[::2]:
                engine.lacking.repeated(call, "")
            if len(engine.lacking):
                self.world.now_s += 0.1

    @property
    def _quiet(self) -> bool:
        return self._held is None and not any(engine.busy for engine in self.engines)

    def _withheld(self) -> bool:
        return any(engine.connector.connector_scheduler._abandoned for engine in self.engines)

    def _wake(self) -> None:
        """An idle engine learns only with its next call that an abandoned transfer is gone."""
        for engine in self.engines:
            if engine.connector.connector_scheduler._abandoned:
                self.events.calls += 1
                engine.add(f"wake-{self.events.calls}", self._new_tokens(BLOCK))
