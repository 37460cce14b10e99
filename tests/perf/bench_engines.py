"""What retention, the return and the hand-over are worth on real engines (CPU, tiny model).

``python -m tests.perf.bench_engines [kept] [return] [streams]``

* *kept*: one engine. Eight sessions wait for their tools while other traffic floods a cache of
  half of what both use. How many of the sessions' tokens are still there, and how fast the
  flood was, with mode ``on`` against ``off``, in turns. All settings are the defaults.
* *return*: a pair. Time to first token of a session of 4,000 tokens, where prefill has lost it
  and takes it from decode, against prefill still having all of it, in turns.
* *streams*: a pair, and vLLM's own pair of ``NixlConnector``. Time between tokens of four
  streams on decode while prompts of 1,000 tokens are handed over: by the same two legs to both,
  in turns (ours as behind a router that is not ours), and once through our router.
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import openai

import turncache
from tests.engine.driving import Driver, words
from tests.perf.figures import Figure, percentile, show, write
from turncache import Outcome
from turncache.protocol import FINAL_HEADER, REQUEST_ID_HEADER
from turncache_server.launch.stack import Stack, StackSpec, start
from turncache_server.stock import HAND_OVER

BLOCK: Final = 32
SESSIONS: Final = 8
#: Of the tiny model, about.
CHARS_PER_TOKEN: Final = 2.9
KEPT_LIMIT, FLOOD_LIMIT = 0.95, 0.97
RETURN_LIMIT, STREAMS_LIMIT = 1.15, 1.1


def started(**spec: Any) -> Stack:
    """Start a stack of the tiny model on free ports."""
    return start(
        StackSpec(
            model="tiny",
            router_port=0,
            dtype="float32",
            log_dir=Path(tempfile.mkdtemp(prefix="bench-engines-")),
            **spec,
        ),
        progress=lambda line: print(line, file=sys.stderr),
    )


def text_of(num_tokens: int) -> list[dict[str, Any]]:
    """Return a question of about so many tokens that nobody has asked before."""
    return [{"role": "user", "content": words(int(num_tokens * CHARS_PER_TOKEN))}]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """One streamed answer, and the seconds from its request to each token."""

    text: str
    tokens_s: tuple[float, ...]
    outcome: Outcome | None = None


def timed(create: Callable[..., Any], **arguments: Any) -> Timed:
    """Make one streamed call: a token is what brings log-probabilities, with text or without."""
    began_s = time.perf_counter()
    stream = create(stream=True, logprobs=True, temperature=0, **arguments)
    tokens_s, text = [], ""
    for chunk in stream:
        if chunk.choices and chunk.choices[0].logprobs:
            tokens_s.append(time.perf_counter() - began_s)
            text += chunk.choices[0].delta.content or ""
    return Timed(text=text, tokens_s=tuple(tokens_s), outcome=turncache.outcome(stream))


class Pair:
    """Calls through our router; with our client where they name a session."""

    def __init__(self, stack: Stack) -> None:
        self._drive = Driver(stack)
        self._model = stack.model

    def ask(
        self,
        messages: list[dict[str, Any]],
        *,
        session: str | None = None,
        salt: str,
        max_tokens: int = 8,
        final: bool = False,
    ) -> Timed:
        """Make one streamed call."""
        client = self._drive.stock
        if session is not None:
            client = self._drive.client.with_session(session)
        return timed(
            client.chat.completions.create,
            model=self._model,
            messages=messages,
            max_tokens=max_tokens,
            extra_body={"cache_salt": salt, "ignore_eos": True},
            extra_headers={FINAL_HEADER: "true"} if final else {},
        )

    def fill(self, messages: list[dict[str, Any]]) -> int:
        """Make one call of a token; returns the prompt's tokens."""
        return fill(self._drive.stock, self._model, messages)

    def set_mode(self, mode: str) -> None:
        """Switch all engines."""
        self._drive.set_mode(mode)

    def close(self) -> None:
        """Close connections."""
        self._drive.close()


def fill(client: openai.OpenAI, model: str, messages: list[dict[str, Any]], **more: Any) -> int:
    """Make one call of a token to an engine or a router; returns the prompt's tokens."""
    done = client.chat.completions.create(
        model=model,
        messages=messages,  # type: ignore[arg-type]
        max_tokens=1,
        extra_body={"cache_salt": uuid.uuid4().hex, **more},
    )
    assert done.usage is not None
    return done.usage.prompt_tokens


class StockPair:
    """Calls to vLLM's own pair in two legs, as every example proxy makes them."""

    def __init__(self, stack: Stack) -> None:
        self._model = stack.model
        self._prefill, self._decode = (
            openai.OpenAI(base_url=f"{each.url}/v1", api_key="-", timeout=120, max_retries=0)
            for each in stack.engines
        )

    def ask(self, messages: list[dict[str, Any]], *, salt: str, max_tokens: int) -> Timed:
        """Make one streamed call."""
        arguments: dict[str, Any] = {"model": self._model, "messages": messages}
        headers = {REQUEST_ID_HEADER: f"bench-{uuid.uuid4().hex}"}
        leg = self._prefill.chat.completions.create(
            **arguments,
            max_tokens=1,
            extra_headers=headers,
            extra_body={"cache_salt": salt, "kv_transfer_params": dict(HAND_OVER)},
        )
        params = (leg.model_extra or {})["kv_transfer_params"]
        return timed(
            self._decode.chat.completions.create,
            **arguments,
            max_tokens=max_tokens,
            extra_headers=headers,
            extra_body={"cache_salt": salt, "ignore_eos": True, "kv_transfer_params": params},
        )

    def fill(self, messages: list[dict[str, Any]]) -> int:
        """Make one call of a token."""
        self.ask(messages, salt=uuid.uuid4().hex, max_tokens=1)
        return 0

    def close(self) -> None:
        """Close connections."""
        self._prefill.close()
        self._decode.close()


# --- kept --------------------------------------------------------------------------------

#: Tokens of a session; of the flood in one wait; and what the cache holds: half of both.
SESSION_TOKENS: Final = 900
FLOOD_CALLS: Final = 24
FLOOD_TOKENS: Final = 1000
POOL_BLOCKS: Final = (SESSIONS * SESSION_TOKENS + FLOOD_CALLS * FLOOD_TOKENS) // (2 * BLOCK)


def round_of_kept(caller: Pair) -> tuple[float, float]:
    """Let eight sessions wait through a flood; return (share kept, tokens per second flooded)."""
    names = [f"s-{uuid.uuid4().hex}" for _ in range(SESSIONS)]
    salt = uuid.uuid4().hex
    histories = [text_of(SESSION_TOKENS) for _ in names]
    complete = 0
    for name, history in zip(names, histories, strict=True):
        reply = caller.ask(history, session=name, salt=salt)
        assert reply.outcome is not None
        # The last token of an answer is never computed.
        complete += (reply.outcome.prompt + len(reply.tokens_s) - 1) // BLOCK
        history += [
            {"role": "assistant", "content": reply.text},
            {"role": "tool", "content": words(100), "tool_call_id": "call-1"},
        ]
    flood = [text_of(FLOOD_TOKENS) for _ in range(FLOOD_CALLS)]
    began_s = time.perf_counter()
    with ThreadPoolExecutor(4) as pool:
        flooded = sum(pool.map(caller.fill, flood))
    flood_s = time.perf_counter() - began_s
    local = 0
    for name, history in zip(names, histories, strict=True):
        outcome = caller.ask(history, session=name, salt=salt, final=True).outcome
        assert outcome is not None
        local += outcome.local
    return local / (complete * BLOCK), flooded / flood_s


def kept(rounds: int = 4) -> Iterator[Figure]:
    """Yield what is kept and how fast the flood is."""
    with started(num_blocks={"single": POOL_BLOCKS}, max_model_len=2560) as stack:
        caller = Pair(stack)
        found: dict[str, list[tuple[float, float]]] = {"on": [], "off": []}
        round_of_kept(caller)
        for number in range(rounds):
            for mode in ("on", "off") if number % 2 else ("off", "on"):
                caller.set_mode(mode)
                found[mode].append(round_of_kept(caller))
        caller.close()
    share = {mode: statistics.median(each[0] for each in found[mode]) for mode in found}
    speed = {mode: statistics.median(each[1] for each in found[mode]) for mode in found}
    yield Figure(
        figure=f"kept of {SESSIONS} sessions in tool waits, cache of half the working set",
        unit="share",
        value=share["on"],
        baseline=share["off"],
        limit=KEPT_LIMIT,
        at_least=True,
    )
    yield Figure(
        figure="throughput of the flood meanwhile",
        unit="tokens/s",
        value=speed["on"],
        baseline=speed["off"],
        limit=FLOOD_LIMIT,
        # In turns: what else this machine does in a minute is in both halves of a round.
        held=statistics.median(
            on[1] / off[1] for on, off in zip(found["on"], found["off"], strict=True)
        ),
        at_least=True,
    )


# --- return ------------------------------------------------------------------------------

RETURN_TOKENS: Final = 4000


def returned(rounds: int = 5) -> Iterator[Figure]:
    """Yield the time to first token of returns against a warm local cache."""
    found: dict[str, list[float]] = {"return": [], "local": []}
    blocks = {"prefill": 200, "decode": 800}
    with started(prefill=1, decode=1, num_blocks=blocks, max_model_len=6000) as stack:
        caller = Pair(stack)
        prefill = next(each for each in stack.engines if each.side == "prefill")
        client = openai.OpenAI(base_url=f"{prefill.url}/v1", api_key="-", timeout=120)

        def flood() -> None:
            for _ in range(2):
                fill(client, stack.model, text_of(3600))

        for number in range(rounds + 1):
            for arm in ("return", "local") if number % 2 else ("local", "return"):
                first_s = one_return(caller, flood if arm == "return" else None)
                if number:
                    found[arm].append(first_s)
        caller.close()
        client.close()
    ours, local = (statistics.median(found[arm]) for arm in ("return", "local"))
    yield Figure(
        figure=f"TTFT of a return at {RETURN_TOKENS} tokens, against a warm local cache",
        unit="ms",
        value=1e3 * ours,
        baseline=1e3 * local,
        limit=RETURN_LIMIT,
        held=ours / local,
    )


def one_return(caller: Pair, flood: Callable[[], None] | None) -> float:
    """Make two calls of a session, with or without a flood between; return the second's TTFT."""
    session, salt = f"s-{uuid.uuid4().hex}", uuid.uuid4().hex
    history = text_of(RETURN_TOKENS)
    reply = caller.ask(history, session=session, salt=salt)
    assert reply.outcome is not None
    history += [
        {"role": "assistant", "content": reply.text},
        {"role": "tool", "content": words(700), "tool_call_id": "call-1"},
    ]
    if flood is not None:
        flood()
    # Prefill is otherwise idle, and whatever the flood has left to do is done.
    time.sleep(0.3)
    again = caller.ask(history, session=session, salt=salt, final=True)
    outcome = again.outcome
    assert outcome is not None
    found = outcome.local if flood is None else outcome.returned
    whole = outcome.reused > reply.outcome.prompt - 2 * BLOCK and found > 0.8 * outcome.reused
    assert whole, f"not what is measured: {outcome}"
    return again.tokens_s[0]


# --- streams -----------------------------------------------------------------------------

STREAMS: Final = 4
MEASURED_S: Final = 20.0
HANDED_OVER_TOKENS: Final = 1000


def gaps_of(caller: Pair | StockPair) -> tuple[list[float], int]:
    """Return seconds between tokens of streams, and how many prompts were handed over."""
    over = threading.Event()
    gaps: list[float] = []
    handed_over = 0

    def stream() -> None:
        while not over.is_set():
            answer = caller.ask(text_of(60), salt=uuid.uuid4().hex, max_tokens=150)
            if measuring.is_set():
                # Behind the first token comes what the hand-over of its own has left.
                gaps.extend(b - a for a, b in itertools.pairwise(answer.tokens_s[1:]))

    measuring = threading.Event()
    with ThreadPoolExecutor(STREAMS) as pool:
        streams = [pool.submit(stream) for _ in range(STREAMS)]
        time.sleep(3.0)
        measuring.set()
        end_s = time.monotonic() + MEASURED_S
        while time.monotonic() < end_s:
            caller.fill(text_of(HANDED_OVER_TOKENS))
            handed_over += 1
        over.set()
        for each in streams:
            each.result()
    return gaps, handed_over


def streams() -> Iterator[Figure]:
    """Yield the time between tokens of decode's other streams, ours against stock."""
    common: dict[str, Any] = {"prefill": 1, "decode": 1, "max_model_len": 2560}
    common |= {"num_blocks": {"prefill": 256, "decode": 512}}
    arms: dict[str, dict[str, Any]] = {
        "ours": {"router": False, "settings": {"foreign_router": True}},
        "stock": {"kind": "nixl"},
        "routed": {},
    }
    gaps: dict[str, list[float]] = {arm: [] for arm in arms}
    counts = dict.fromkeys(arms, 0)
    for arm in ("ours", "stock", "stock", "ours", "routed"):
        with started(**common, **arms[arm]) as stack:
            caller = Pair(stack) if arm == "routed" else StockPair(stack)
            found, count = gaps_of(caller)
            caller.close()
        gaps[arm] += found
        counts[arm] += count
    for arm, where in (("ours", ""), ("routed", " through our router")):
        for share in (0.5, 0.9, 0.99):
            mine, theirs = percentile(gaps[arm], share), percentile(gaps["stock"], share)
            yield Figure(
                figure=f"time between tokens of {STREAMS} streams{where}, p{share * 100:g}",
                unit="ms",
                value=1e3 * mine,
                baseline=1e3 * theirs,
                # A router's own way is in all that goes through it, and is not decode's.
                limit=STREAMS_LIMIT if share > 0.9 and arm == "ours" else None,
                held=mine / theirs,
            )
    yield Figure(
        figure="prompts handed over meanwhile",
        unit="prompts",
        value=counts["ours"],
        baseline=counts["stock"],
    )


PARTS: Final[dict[str, Callable[[], Iterator[Figure]]]] = {
    "kept": kept,
    "return": returned,
    "streams": streams,
}


def main() -> int:
    """Measure, print and write; returns 1 when a figure misses its limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("parts", nargs="*", help=f"of {', '.join(PARTS)}; all by default")
    options = parser.parse_args()
    codes = [
        write(f"engines-{name}", show(part()))
        for name, part in PARTS.items()
        if not options.parts or name in options.parts
    ]
    return max(codes)


if __name__ == "__main__":
    sys.exit(main())
