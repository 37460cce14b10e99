"""Messages of the control plane, versioned.

A message is one msgpack map ``{v, id, to, body}``. The version is checked before the body
is decoded, so that another version gets a clear answer. Times never cross as clock
readings, only as remaining seconds. Unknown members are ignored.

A version understands its neighbours, so that a fleet can be updated engine by engine; what
is further away is refused by name. An answer has the version of its question where that is
the older one.

Version history of :data:`CONTROL_VERSION`:

1. hello, peek, verify, call, signal, mode, stats.
2. ``to`` in the envelope, the engine's name in hello, a ticket for every change of mode;
   drain, sessions, lacking and repeated, which a side without them refuses as
   ``unsupported``.
"""

from __future__ import annotations

import hashlib
import math
from typing import Final, get_args

import msgspec

from turncache.errors import ProtocolError

CONTROL_VERSION: Final = 2
#: Versions that differ from ours by this much are understood.
VERSION_SKEW: Final = 1
#: A peek of 100,000 tokens in blocks of 16 carries 6,250 hashes of 32 bytes: 213 KB.
MAX_MESSAGE_BYTES: Final = 8 * 1024 * 1024
MAX_HASHES: Final = 131_072
#: Most sessions in one answer, some 100 bytes each.
MAX_SESSIONS: Final = 10_000
#: Why a message was not acted upon; also the codes of a :class:`Refusal`.
#:
#: ``malformed`` no message, or one that breaks its form; ``too_large`` above a bound;
#: ``version`` too far from ours; ``unsupported`` a question that this side does not know;
#: ``other_engine`` meant for an engine of another name; ``stale`` a change that was asked for
#: before, or of another start of the engine; ``unauthenticated`` a connection that did not
#: prove the fleet's key, or proved one where there is none; ``unsent`` an answer that its
#: asker did not take; ``error`` a failure of ours.
DROP_CODES: Final = (
    "malformed",
    "too_large",
    "version",
    "unsupported",
    "other_engine",
    "stale",
    "unauthenticated",
    "unsent",
    "error",
)
#: Codes of a refused hello that no waiting cures: somebody has to change a setting or a version.
INCOMPATIBLE_CODES: Final = ("other_engine", "unauthenticated", "version")


class Hello(msgspec.Struct, frozen=True, kw_only=True, tag="hello"):
    """Who are you, and may we exchange KV?"""


class Peek(msgspec.Struct, frozen=True, kw_only=True, tag="peek"):
    """Which written blocks of this hash chain do you hold, at which epochs?

    Attributes:
        session: namespaced session id; only counts what was known, never grants anything.
        hashes: chain hashes of the prompt's full blocks, in order.
    """

    session: str
    hashes: list[bytes]


class Verify(msgspec.Struct, frozen=True, kw_only=True, tag="verify"):
    """Are these blocks still what they were at the peek?

    Attributes:
        start_id: of the source when it was peeked at.
        generation: likewise.
        block_ids: blocks that were read.
        epochs: their epochs at the peek.
        hashes: what they must hold.
        rest: block id and epoch of the rest that was read behind them, None for none.
    """

    start_id: str
    generation: int
    block_ids: list[int]
    epochs: list[int]
    hashes: list[bytes]
    rest: tuple[int, int] | None = None


class Call(msgspec.Struct, frozen=True, kw_only=True, tag="call"):
    """What happened to the KV of the call that carried ``tc_request``?"""

    request: str


class Signal(msgspec.Struct, frozen=True, kw_only=True, tag="signal"):
    """What the world outside a request says about a session.

    Attributes:
        session: namespaced session id.
        kind: ``wait``, ``resume``, ``final``, ``compaction`` or ``cancel``
            (:class:`turncache_server.retention.values.Signal`).
        expect_s: of a wait: seconds until the next call, None when nobody knows.
    """

    session: str
    kind: str
    expect_s: float | None = None


class SetMode(msgspec.Struct, frozen=True, kw_only=True, tag="mode"):
    """Switch to ``off``, ``observe`` or ``on``; an empty mode only asks.

    Attributes:
        ticket: from the answer to an empty mode. It is good for one change of this start of
            the engine, so that a message which arrives twice or late changes nothing.
    """

    mode: str = ""
    ticket: str = ""


class Stats(msgspec.Struct, frozen=True, kw_only=True, tag="stats"):
    """Counters and gauges of the extension."""


class SetDraining(msgspec.Struct, frozen=True, kw_only=True, tag="drain"):
    """Hand your sessions to the other engines, or stop doing so.

    Attributes:
        ticket: as of a change of mode.
    """

    draining: bool
    ticket: str


class Sessions(msgspec.Struct, frozen=True, kw_only=True, tag="sessions"):
    """Which sessions do you keep or serve?

    Attributes:
        limit: most sessions in the answer, the largest first.
        session: digest of the only one that is asked about, empty for all. An engine that
            does not know this member answers for all.
    """

    limit: int = 1000
    session: str = ""


class Lacking(msgspec.Struct, frozen=True, kw_only=True, tag="lacking"):
    """Which calls wait here for their prompt to be prefilled again?"""


class Repeated(msgspec.Struct, frozen=True, kw_only=True, tag="repeated"):
    """The prefill leg of a call that waits has been repeated, or will not be.

    Attributes:
        request: ``tc_request`` of the call.
        source: engine id of who has computed the prompt, empty when nobody will: the call
            waits no longer.
    """

    request: str
    source: str = ""


Request = (
    Hello
    | Peek
    | Verify
    | Call
    | Signal
    | SetMode
    | Stats
    | SetDraining
    | Sessions
    | Lacking
    | Repeated
)


class HelloReply(msgspec.Struct, frozen=True, kw_only=True, tag="hello_reply"):
    """What a peer needs to know before it may read from this engine.

    Attributes:
        name: the engine's name in the settings of peers and router, empty where it has none.
        engine_id: NIXL engine id.
        start_id: random per start of the engine process.
        generation: rises whenever cached KV stops being valid.
        side: ``prefill``, ``decode`` or ``single``.
        mode: what the extension does at present.
        fingerprint: everything that must be equal for KV to be exchanged.
        nixl_host: host of the NIXL side channel, empty where there is none.
        nixl_port: port of the NIXL side channel.
        tp_size: tensor parallel size.
        block_size: tokens per block.
        num_blocks: blocks in the pool.
        max_model_len: longest sequence in tokens.
        vllm_version: version of vLLM.
        missing: what keeps this engine from its full use, in words.
    """

    engine_id: str
    start_id: str
    generation: int
    side: str
    mode: str
    fingerprint: dict[str, str]
    nixl_host: str = ""
    nixl_port: int = 0
    tp_size: int = 1
    block_size: int = 0
    num_blocks: int = 0
    max_model_len: int = 0
    vllm_version: str = ""
    missing: list[str] = []
    name: str = ""

    def is_of(self, answer: PeekReply) -> bool:
        """Whether an answer is of the very start and cache that this hello spoke for."""
        return (self.start_id, self.generation) == (answer.start_id, answer.generation)


class RestBlock(msgspec.Struct, frozen=True, kw_only=True):
    """A block behind a chain that is not full (:mod:`turncache_server.retention.rests`).

    Attributes:
        block_id: the block.
        epoch: its epoch.
        num_tokens: slots that are written, below the block size.
        key: names their tokens.
    """

    block_id: int
    epoch: int
    num_tokens: int
    key: bytes


class PeekReply(msgspec.Struct, frozen=True, kw_only=True, tag="peek_reply"):
    """The longest written prefix of the chain.

    Attributes:
        block_ids: one block per hash, as far as held.
        epochs: their epochs.
        known: hashes of the chain that this engine once computed for the session,
            whether or not it still holds them.
        rests: what it holds behind the last of these blocks, empty from an older engine.
    """

    start_id: str
    generation: int
    block_ids: list[int]
    epochs: list[int]
    known: int = 0
    rests: list[RestBlock] = []


class VerifyReply(msgspec.Struct, frozen=True, kw_only=True, tag="verify_reply"):
    """How many of the blocks, from the first, are unchanged.

    Attributes:
        rest: so is the rest behind them.
    """

    start_id: str
    generation: int
    valid: int
    rest: bool = False


class CallReply(msgspec.Struct, frozen=True, kw_only=True, tag="call_reply"):
    """Outcome of a call on this engine, in tokens; ``found`` is false for an unknown id.

    Attributes:
        done: the call has ended here; before, the counts are those of its admission.
    """

    found: bool
    done: bool = False
    prompt: int = 0
    local: int = 0
    returned: int = 0
    computed: int = 0
    lost: int = 0
    reason: str = "ok"
    at: int | None = None
    pull_s: float = 0.0


class SignalReply(msgspec.Struct, frozen=True, kw_only=True, tag="signal_reply"):
    """What became of a signal.

    Attributes:
        accepted: the engine acts on it.
        clipped_s: the expectation that counts instead of the one given, None when that counts.
        why: why it was not accepted.
    """

    accepted: bool
    clipped_s: float | None = None
    why: str = ""


class ModeReply(msgspec.Struct, frozen=True, kw_only=True, tag="mode_reply"):
    """The mode that is in force and why it may differ from what was asked.

    Attributes:
        pulls: the engine takes and gives KV by verified pulls; without them a router has
            prompts handed over as stock does.
        ticket: what the next change has to carry.
        draining: the engine is to be stopped: routers place no session on it any more, and
            name it as the source of those that it has.
        start_id: random per start of the engine process, empty from an older engine.
    """

    mode: str
    why: str = ""
    pulls: bool = True
    ticket: str = ""
    draining: bool = False
    start_id: str = ""


class StatsReply(msgspec.Struct, frozen=True, kw_only=True, tag="stats_reply"):
    """Counters (monotone) and gauges (now) by name."""

    counters: dict[str, float]
    gauges: dict[str, float]


def session_digest(session: str) -> str:
    """Return what a session is called by in logs, listings and questions: never its id.

    Args:
        session: its namespaced id.
    """
    return hashlib.blake2b(session.encode(), digest_size=6).hexdigest()


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """One session of an engine. Times are seconds from the answer on.

    Attributes:
        session: digest of its namespaced id, the one in the router's log.
        state: ``serving`` while a call is in flight, else ``waiting``.
        lineages: chains that are remembered.
        kept_blocks: blocks that are kept for it; what sessions share counts in each.
        expected_s: until it is expected back, below 0 when it is overdue, None when nobody
            knows.
        kept_s: for how long something is kept for it, None while a call is in flight.
    """

    session: str
    state: str
    lineages: int
    kept_blocks: int
    expected_s: float | None = None
    kept_s: float | None = None


class SessionsReply(msgspec.Struct, frozen=True, kw_only=True, tag="sessions_reply"):
    """The sessions that an engine keeps or serves.

    Attributes:
        rows: the largest of them.
        num_sessions: how many there are.
        num_handovers: prompts that a decode engine has not taken yet.
        num_calls: calls in flight, of any session or none.
        block_size: tokens per block.
    """

    name: str
    side: str
    rows: list[SessionRow]
    num_sessions: int
    num_handovers: int
    num_calls: int
    block_size: int
    draining: bool = False


class LackingReply(msgspec.Struct, frozen=True, kw_only=True, tag="lacking_reply"):
    """The calls whose prompt is to be prefilled again, and of whom nobody has said that it was.

    Attributes:
        requests: their ``tc_request``, bounded by how many may wait.
    """

    requests: list[str]


class Refusal(msgspec.Struct, frozen=True, kw_only=True, tag="refusal"):
    """The request was not carried out.

    Attributes:
        code: one of :data:`DROP_CODES`.
        why: what was wrong, in words.
    """

    code: str
    why: str


Reply = (
    HelloReply
    | PeekReply
    | VerifyReply
    | CallReply
    | SignalReply
    | ModeReply
    | StatsReply
    | SessionsReply
    | LackingReply
    | Refusal
)


class Envelope(msgspec.Struct, frozen=True):
    """What surrounds a message.

    Attributes:
        v: version of the side that has sent it.
        id: pairs an answer with its question.
        body: the message, not decoded.
        to: name of the engine that is asked, empty for whoever listens there.
    """

    v: int
    id: int
    body: msgspec.Raw
    to: str = ""


_envelopes = msgspec.msgpack.Decoder(Envelope)
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)
_types: msgspec.msgpack.Decoder[dict[str, msgspec.Raw]] = msgspec.msgpack.Decoder(
    dict[str, msgspec.Raw]
)
_encoder = msgspec.msgpack.Encoder()
_KNOWN: Final = frozenset(
    str(kind.__struct_config__.tag) for kind in (*get_args(Request), *get_args(Reply))
)


def encode(
    number: int, body: Request | Reply, *, to: str = "", version: int = CONTROL_VERSION
) -> bytes:
    """Encode one message.

    Args:
        number: pairs an answer with its question.
        body: the message.
        to: name of the engine that is asked.
        version: of the question, for an answer; a newer one than ours is answered in ours.

    Raises:
        ProtocolError: field ``too_large``; a socket would drop the connection instead.
    """
    envelope: dict[str, object] = {"v": min(version, CONTROL_VERSION), "id": number}
    if to:
        envelope["to"] = to
    data = _encoder.encode({**envelope, "body": body})
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_large", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
    return data


def read_envelope(data: bytes) -> Envelope:
    """Check size and version, and return the envelope.

    Raises:
        ProtocolError: field ``too_large``, ``malformed`` or ``version``.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        raise ProtocolError("too_large", f"{len(data)} bytes; at most {MAX_MESSAGE_BYTES}")
    try:
        envelope = _envelopes.decode(data)
    except msgspec.DecodeError as error:
        raise ProtocolError("malformed", str(error)) from error
    if abs(envelope.v - CONTROL_VERSION) > VERSION_SKEW:
        raise ProtocolError(
            "version",
            f"control version {envelope.v}; this side speaks {CONTROL_VERSION} and understands "
            f"{CONTROL_VERSION - VERSION_SKEW} to {CONTROL_VERSION + VERSION_SKEW}: update the "
            "older side",
        )
    return envelope


def open_envelope(data: bytes) -> tuple[int, bytes]:
    """Check size and version, and return (number, undecoded body).

    Raises:
        ProtocolError: as :func:`read_envelope`.
    """
    envelope = read_envelope(data)
    return envelope.id, bytes(envelope.body)


def question_number(data: bytes) -> int:
    """Return the number of a message that :func:`read_envelope` refused, 0 when unreadable.

    A refusal that carries another number would be taken for a late answer and dropped.
    """
    if len(data) > MAX_MESSAGE_BYTES:
        return 0
    try:
        return _envelopes.decode(data).id
    except msgspec.DecodeError:
        return 0


def decode_request(body: bytes | msgspec.Raw, *, version: int = CONTROL_VERSION) -> Request:
    """Decode a question.

    Args:
        body: the message.
        version: of the side that asks; a change of mode carries a ticket from version 2 on.

    Raises:
        ProtocolError: when it is no known question or breaks a bound.
    """
    try:
        request = _requests.decode(body)
    except msgspec.DecodeError as error:
        raise _undecodable(body, error) from error
    if isinstance(request, (Peek, Verify)) and len(request.hashes) > MAX_HASHES:
        raise ProtocolError("too_large", f"{len(request.hashes)} hashes; at most {MAX_HASHES}")
    if isinstance(request, Verify) and not (
        len(request.block_ids) == len(request.epochs) == len(request.hashes)
    ):
        raise ProtocolError("malformed", "block_ids, epochs and hashes differ in length")
    if isinstance(request, Signal) and not 0 <= (request.expect_s or 0.0) < math.inf:
        raise ProtocolError("malformed", f"expect_s {request.expect_s}: expected seconds from 0")
    if isinstance(request, Sessions) and not 0 <= request.limit <= MAX_SESSIONS:
        raise ProtocolError("too_large", f"limit {request.limit}: expected 0 to {MAX_SESSIONS}")
    if isinstance(request, SetMode) and request.mode and not request.ticket and version > 1:
        raise ProtocolError("malformed", "a change of mode without a ticket: ask for it first")
    return request


def _undecodable(body: bytes | msgspec.Raw, error: msgspec.DecodeError) -> ProtocolError:
    """Tell a question that only a newer side knows from one that is broken."""
    try:
        kind = msgspec.msgpack.decode(_types.decode(body).get("type", b""), type=str)
    except msgspec.DecodeError:
        return ProtocolError("malformed", str(error))
    if kind in _KNOWN:
        return ProtocolError("malformed", str(error))
    return ProtocolError("unsupported", f"unknown message {kind[:64]!r}; this side may be older")


def decode_reply(body: bytes | msgspec.Raw) -> Reply:
    """Decode an answer.

    Raises:
        ProtocolError: when it is no known answer.
    """
    try:
        return _replies.decode(body)
    except msgspec.DecodeError as error:
        raise _undecodable(body, error) from error
