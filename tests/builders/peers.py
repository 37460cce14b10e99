"""Peers without sockets: questions that the test has answered and delivered."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from turncache_server.connector.peers import Peer
from turncache_server.control.messages import Peek, PeekReply, Verify, VerifyReply

if TYPE_CHECKING:
    from tests.builders.engines import Engine, World


@dataclass(eq=False)
class Question:
    """One question under way: asked, answered at the source, delivered."""

    peer: str
    body: Peek | Verify
    future: Future[Any]
    reply: PeekReply | VerifyReply | None = None


class DirectPeers:
    """Stands for ``PeerBook``: questions wait until the test has them answered and delivered.

    So a peek can be answered at any moment of the source's life, and be delivered later.

    Attributes:
        greets: a source that is found to be another one than at its last hello is greeted in
            time; else that takes until after the answer.
    """

    def __init__(self, world: World, names: Sequence[str]) -> None:
        self._world = world
        self._names = names
        self._known: dict[str, Peer] = {}
        self.questions: list[Question] = []
        self.greets = True

    def start(self) -> None:
        """Nothing to start."""

    def close(self) -> None:
        """Nothing to close."""

    def hurry(self) -> None:
        """Forget what was said at the last hello."""
        self._known.clear()

    def get(self, name: str) -> Peer | None:
        """Return a peer as its last hello left it."""
        if name not in self._names:
            return None
        if name not in self._known:
            engine = self._world.engines.get(name)
            if engine is None:
                return Peer(name=name, control_address="")
            self._known[name] = engine.as_peer()
        return self._known[name]

    def all(self) -> list[Peer]:
        """Return every peer."""
        return [peer for name in self._names if (peer := self.get(name)) is not None]

    def peek(self, peer: Peer, session: str, hashes: list[bytes]) -> Future[PeekReply]:
        """Keep the question."""
        return self._ask(peer.name, Peek(session=session, hashes=hashes))

    def verify(self, peer: Peer, question: Verify) -> Future[VerifyReply]:
        """Keep the question."""
        return self._ask(peer.name, question)

    def _ask(self, name: str, body: Peek | Verify) -> Future[Any]:
        question = Question(name, body, Future())
        self.questions.append(question)
        return question.future

    def answer(self, question: Question) -> None:
        """Have the source answer, as its control thread would at this moment."""
        if question.reply is None and not question.future.cancelled():
            engine = self._world.engines[question.peer]
            question.reply = reply = engine.ask(question.body)
            if isinstance(reply, PeekReply) and self.greets:
                self._greet_anew(engine, reply)

    def _greet_anew(self, engine: Engine, reply: PeekReply) -> None:
        known = self._known.get(engine.name)
        if known is None or known.hello is None or not known.hello.is_of(reply):
            self._known[engine.name] = engine.as_peer()

    def deliver(self, question: Question) -> None:
        """Bring the answer to the asker; answers first when nobody has."""
        self.answer(question)
        self.questions.remove(question)
        if not question.future.cancelled():
            question.future.set_result(question.reply)

    def lose(self, question: Question, error: Exception) -> None:
        """Let the question end in an error."""
        self.questions.remove(question)
        if not question.future.cancelled():
            question.future.set_exception(error)
