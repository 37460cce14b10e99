"""The router's admission in simulated time: the real core, and who waits before it. Pure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from turncache_server.router.admission import Admission, Arrival, How, Release, State, Verdict
from turncache_tools.plan.events import Events
from turncache_tools.plan.flight import Call, Session
from turncache_tools.plan.load import AdmissionRules

#: After which a client whose call was refused tries again.
_RETRY_S: Final = 5.0


class Entrance:
    """Lets calls of sessions in.

    Args:
        rules: the router's settings.
        pool_tokens: of the engine that keeps sessions.
        events: simulated time.
        enter: told of a session whose call has been let in, and when it had arrived.
    """

    def __init__(
        self,
        rules: AdmissionRules,
        pool_tokens: float,
        events: Events,
        enter: Callable[[float, Session, float], None],
    ) -> None:
        self._core = Admission(
            idle_s=rules.idle_s, wait_s=rules.wait_s, max_waiting=rules.max_waiting
        )
        self._core.set_fits(int(rules.share * pool_tokens))
        self._events = events
        self._enter = enter
        self._waiting: dict[str, tuple[Session, float]] = {}
        self._due_s = float("inf")
        self.num_late = 0

    @property
    def state(self) -> State:
        """The working set and the queue."""
        return self._core.state()

    def arrive(self, now_s: float, session: Session, prompt: int) -> None:
        """Take a session whose next call comes; ``prompt`` in tokens."""
        self._ask(now_s, session, prompt, now_s)

    def _ask(self, now_s: float, session: Session, prompt: int, arrived_s: float) -> None:
        spec, name = session.spec, f"{session.name} {session.number}"
        in_turn = session.number > 0 and not spec.calls[session.number].by_user
        verdict, released = self._core.ask(
            Arrival(
                call=name,
                session=session.name,
                tokens=prompt,
                above=() if session.parent is None else (session.parent,),
                urgent=in_turn,
            ),
            now_s,
        )
        self._let_in(now_s, released)
        if verdict is Verdict.ENTER:
            self._enter(now_s, session, arrived_s)
        elif verdict is Verdict.WAIT:
            self._waiting[name] = session, arrived_s
            self._wake(now_s)
        else:
            self._retry(now_s, session, arrived_s)

    def ended(self, now_s: float, call: Call, *, final: bool) -> None:
        """Take the end of a call that was let in."""
        assert call.session is not None
        released = self._core.ended(
            f"{call.session.name} {call.number - 1}",
            now_s,
            well=True,
            tokens=call.prompt + call.spec.answer,
            shared=call.local + call.returned if call.number == 1 else None,
            final=final,
        )
        self._let_in(now_s, released)

    def _let_in(self, now_s: float, released: list[Release]) -> None:
        for name, how, _ in released:
            session, arrived_s = self._waiting.pop(name)
            if how is How.REFUSED:
                self._retry(now_s, session, arrived_s)
            else:
                self.num_late += how is How.LATE
                self._enter(now_s, session, arrived_s)
        self._wake(now_s)

    def _retry(self, now_s: float, session: Session, arrived_s: float) -> None:
        prompt = session.history + session.spec.calls[session.number].new

        def again(at_s: float, _: None) -> None:
            self._ask(at_s, session, prompt, arrived_s)

        self._events.at(now_s + _RETRY_S, again, None)

    def _wake(self, now_s: float) -> None:
        due_s = self._core.due_s()
        if due_s is not None and (due_s < self._due_s or self._due_s <= now_s):
            self._due_s = max(due_s, now_s)
            self._events.at(self._due_s, self._due, None)

    def _due(self, now_s: float, _: None) -> None:
        if now_s >= self._due_s:
            self._due_s = float("inf")
        self._let_in(now_s, self._core.advance(now_s))
