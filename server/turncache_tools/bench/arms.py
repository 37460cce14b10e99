"""Arms: what is compared, which of them a stack can show, and in which order. Pure."""

from __future__ import annotations

import enum
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from turncache.errors import UsageError
from turncache.protocol import Mode
from turncache.spelling import did_you_mean


class Hints(enum.StrEnum):
    """What the calls of an arm say about their session."""

    NONE = "none"
    SESSION = "session"
    ALL = "all"


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmKind:
    """What is known of an arm by its name.

    Attributes:
        what: for people.
        hints: that its calls carry.
        mode: of the engines, None where it is not ours to switch.
        returns: the router takes KV back, None where it is not ours to switch.
        ours: it needs our engines.
        pair: it needs prefill and decode apart.
        elsewhere: why it cannot be switched on while a stack runs; empty when it can.
        brings_back: on a stock pair, each call brings what decode said with the last answer.
    """

    what: str
    hints: Hints = Hints.NONE
    mode: Mode | None = None
    returns: bool | None = None
    ours: bool = False
    pair: bool = False
    elsewhere: str = ""
    brings_back: bool = False


OFF = "off"
OFF_AGAIN = "off again"

KINDS: Mapping[str, ArmKind] = {
    OFF: ArmKind(what="stock behaviour", mode=Mode.OFF, returns=False),
    "idle": ArmKind(what="ours, no hints", mode=Mode.ON, returns=False, ours=True),
    "retention": ArmKind(
        what="hints, nothing returned", mode=Mode.ON, returns=False, hints=Hints.ALL, ours=True
    ),
    "both": ArmKind(
        what="retention and return",
        mode=Mode.ON,
        returns=True,
        hints=Hints.ALL,
        ours=True,
        pair=True,
    ),
    "warm-ahead": ArmKind(
        what="the next prompt is computed during the wait",
        hints=Hints.ALL,
        elsewhere="this router does not warm ahead",
    ),
    "bidirectional": ArmKind(
        what="stock bidirectional_kv_xfer",
        hints=Hints.SESSION,
        elsewhere="it is a flag of the engines at their start",
        brings_back=True,
    ),
    "offload": ArmKind(
        what="stock host tier",
        hints=Hints.SESSION,
        elsewhere="it is a flag of the engines at their start",
    ),
    "p2p": ArmKind(
        what="stock host tier between engines",
        hints=Hints.SESSION,
        elsewhere="it is a flag of the engines at their start",
    ),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StackFacts:
    """What a stack is and what of it can be switched.

    Attributes:
        ours: its answers carry our header.
        pair: prefill and decode are apart, None when it does not say.
        controls: control sockets that were named.
        admin: the router lets returns be switched.
        returns: what the switch says, None without one.
        metrics: engines whose counters can be read.
    """

    ours: bool
    pair: bool | None = None
    controls: int = 0
    admin: bool = False
    returns: bool | None = None
    metrics: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StockPair:
    """Stock prefill and decode engines without a router: the bench makes both legs of a call.

    Attributes:
        prefill: base URL.
        decode: likewise.
        returning: each call brings what decode said with the last answer.
    """

    prefill: str
    decode: str
    returning: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Arm:
    """An arm that is measured.

    Attributes:
        name: ``off`` is what the others are compared with.
        what: for people.
        url: where its calls go; of a stock pair, its decode engine.
        pair: they go there in two legs, None for one.
        hints: that they carry.
        mode: to switch engines to, None for nothing to switch.
        returns: to switch the router to, None for nothing to switch.
    """

    name: str
    what: str
    url: str
    pair: StockPair | None = None
    hints: Hints = Hints.NONE
    mode: Mode | None = None
    returns: bool | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class NotMeasurable:
    """An arm that this stack cannot show, and why."""

    name: str
    why: str


def check_arms(wanted: Sequence[str], urls: Collection[str]) -> None:
    """Check names of arms, before a stack is asked for anything.

    Args:
        wanted: names.
        urls: names of arms with a stack of their own.

    Raises:
        UsageError: an unknown name without a URL.
    """
    for name in wanted:
        if name not in KINDS and name not in urls:
            raise UsageError(
                f"--arms {name}{did_you_mean(name, KINDS)}: expected {', '.join(KINDS)}, or --arm "
                f"{name}=URL for a stack of its own"
            )


def choose_arms(
    wanted: Sequence[str], facts: StackFacts, *, url: str, urls: Mapping[str, Sequence[str]]
) -> tuple[list[Arm], list[NotMeasurable]]:
    """Say which arms are measured.

    Args:
        wanted: names; ``off`` is added.
        facts: of the stack at ``url``.
        url: base URL of the stack.
        urls: arms with a stack of their own: its base URL, or those of prefill and decode.

    Raises:
        UsageError: an unknown name without a URL, or nothing to compare with.
    """
    check_arms(wanted, urls)
    names = list(dict.fromkeys([OFF, *wanted, *urls]))
    arms: list[Arm] = []
    missing: list[NotMeasurable] = []
    for name in names:
        kind = KINDS.get(name)
        if name in urls:
            arms.append(_elsewhere(name, kind, urls[name]))
            continue
        assert kind is not None, "it has been checked"
        why = _missing(name, kind, facts)
        if why:
            missing.append(NotMeasurable(name=name, why=why))
            continue
        arms.append(
            Arm(
                name=name,
                what=kind.what,
                url=url,
                hints=kind.hints,
                mode=kind.mode if facts.controls else None,
                returns=kind.returns if facts.admin else None,
            )
        )
    if not arms or arms[0].name != OFF:
        raise UsageError(
            f"there is nothing to compare with: off is not measurable here: {missing[0].why}"
        )
    return arms, missing


def _elsewhere(name: str, kind: ArmKind | None, urls: Sequence[str]) -> Arm:
    """Return an arm with a stack of its own."""
    pair = None
    if len(urls) > 1:
        returning = kind is not None and kind.brings_back
        pair = StockPair(prefill=urls[0], decode=urls[-1], returning=returning)
    return Arm(
        name=name,
        what="a stack of its own" if kind is None else kind.what,
        url=urls[-1],
        pair=pair,
        hints=Hints.NONE if kind is None else kind.hints,
    )


def _missing(name: str, kind: ArmKind, facts: StackFacts) -> str:
    if kind.elsewhere:
        return f"{kind.elsewhere}; give a stack that has it with --arm {name}=URL"
    if kind.ours and not facts.ours:
        return "the stack's answers carry no Turncache header: it is not ours"
    if kind.pair and facts.pair is False:
        return "one engine does prefill and decode: there is nothing to return from"
    return _cannot_switch(name, kind, facts) if facts.ours else ""


def _cannot_switch(name: str, kind: ArmKind, facts: StackFacts) -> str:
    if not facts.controls:
        if kind.mode is Mode.OFF:
            return (
                "engines cannot be switched off without their control sockets (--control), and "
                f"no other stack is given (--arm {name}=URL)"
            )
        # Without a control socket the engines stay as they are, which may be another mode.
        return "the engines' mode cannot be known without their control sockets (--control)"
    if kind.returns is not None and facts.pair is not False and not facts.admin:
        if kind.mode is Mode.OFF:
            return ""
        if facts.returns is not kind.returns:
            return "returns cannot be switched: the router's setting admin is not on"
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One run of the whole workload in one arm.

    Attributes:
        number: from 0.
        arm: its name; ``off again`` is off, to be compared with off.
        round: from 1; blocks of one round are compared with each other. 0: warm-up.
    """

    number: int
    arm: str
    round: int


def schedule(names: Sequence[str], *, rounds: int) -> list[Block]:
    """Return the blocks: in every round off at both ends and the arms between, turned in even ones.

    A machine's speed drifts by more than what is measured. So every arm lies between two blocks
    of off, which are as far from each other as blocks of a round can be: off against off tells
    what the drift of a round comes to, and in an even number of rounds a linear one is cancelled.

    Args:
        names: of the arms, off first.
        rounds: of all arms.
    """
    order = []
    for number in range(1, rounds + 1):
        turn = [*names, OFF_AGAIN]
        order += [(name, number) for name in (turn if number % 2 else reversed(turn))]
    return [Block(number=at, arm=arm, round=nr) for at, (arm, nr) in enumerate(order)]
