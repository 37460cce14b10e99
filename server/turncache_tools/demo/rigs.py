"""Running engines, as the demo drives them. The only file that starts a stack."""

from __future__ import annotations

import enum
import json
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from turncache.errors import EngineFault
from turncache.protocol import Mode
from turncache_server.control.client import ControlClient, switch_mode
from turncache_server.control.messages import Stats, StatsReply
from turncache_server.launch.spec import Kind, StackSpec
from turncache_server.launch.stack import Stack, start
from turncache_tools.demo.callers import Caller, RoutedCaller, StockPairCaller
from turncache_tools.demo.counters import PromptTokens, read_prompt_tokens
from turncache_tools.demo.edited import Returning
from turncache_tools.demo.sizes import Sizes

MODEL: Final = "smollm2"
#: The pool holds one session and little more, so that session may have all of it. And what
#: can come back does: by default the last 64 tokens are left to be computed.
_SETTINGS: Final = MappingProxyType(
    {"retain_budget": 1.0, "tenant_budget": 1.0, "kv_recompute_threshold": 0}
)
_ASK_TIMEOUT_S: Final = 5.0
_SETTLE_S: Final = 5.0
#: The router asks its engines for their mode at every health check.
_SWITCH_S: Final = 20.0
_SETTLE_EVERY_S: Final = 0.01
_HTTP_TIMEOUT_S: Final = 30.0


class Engines(enum.StrEnum):
    """What the demo starts."""

    SINGLE = "single"
    SINGLE_OFF = "single-off"
    PAIR = "pair"
    STOCK = "stock"


#: How many engines each of them is.
NUM_ENGINES: Final[Mapping[Engines, int]] = {
    Engines.SINGLE: 1,
    Engines.SINGLE_OFF: 1,
    Engines.PAIR: 2,
    Engines.STOCK: 3,
}
_KINDS: Final[Mapping[Engines, Kind]] = {
    Engines.SINGLE: "turncache",
    Engines.SINGLE_OFF: "turncache",
    Engines.PAIR: "turncache",
    Engines.STOCK: "nixl-bidirectional",
}
#: Of the stock engines only the second decode engine returns KV. Prefill's flag does nothing
#: to a call that brings no blocks back, so that one prefill engine serves both acts.
_STOCK_RETURNS: Final = ("prefill-0", "decode-1")


class Rig(Protocol):
    """Engines that serve one or several arms."""

    @property
    def caller(self) -> Caller:
        """How calls reach them."""

    @property
    def returning(self) -> Returning | None:
        """How calls reach stock engines that return KV unchecked, None without such."""

    @property
    def ours(self) -> bool:
        """The engines have our extension, which can be switched."""

    def prompt_tokens(self) -> PromptTokens:
        """Read vLLM's counters on the engine that does the prefill."""

    def held(self) -> dict[str, float]:
        """Return the share of each engine's pool that is retained."""

    def set_mode(self, mode: Mode) -> None:
        """Switch the extension of every engine."""

    def set_return(self, *, enabled: bool) -> None:
        """Switch returns in the router."""

    def count_tokens(self, text: str) -> int:
        """Count a text's tokens with the model's own tokenizer."""

    def stop(self) -> None:
        """End everything. May be called again."""


class StackRig:
    """A stack of the launcher's.

    Args:
        stack: what runs; stopped with this.
    """

    def __init__(self, stack: Stack) -> None:
        self.stack = stack
        self._stopped = False
        self._control = ControlClient()
        self._prefill = next(e for e in stack.engines if e.side != "decode")
        self.caller: Caller
        self.returning: StockPairCaller | None = None
        if stack.spec.has_router:
            self.caller = RoutedCaller(stack.base_url, stack.model)
        else:
            plain, returning = (e.url for e in stack.engines if e.side == "decode")
            self.caller = StockPairCaller(self._prefill.url, plain, stack.model)
            self.returning = StockPairCaller(self._prefill.url, returning, stack.model)

    @property
    def ours(self) -> bool:
        """The engines have our extension."""
        return self.stack.spec.kind == "turncache"

    def prompt_tokens(self) -> PromptTokens:
        """Read vLLM's counters."""
        return read_prompt_tokens(_get(f"{self._prefill.url}/metrics"))

    def held(self) -> dict[str, float]:
        """Return the retained share by side; nothing for stock engines."""
        shares: dict[str, float] = {}
        for engine in self.stack.engines:
            if engine.control_address is not None:
                gauges = self._control.ask(
                    engine.control_address, Stats(), StatsReply, timeout_s=_ASK_TIMEOUT_S
                ).gauges
                shares[engine.side] = gauges["retained_blocks"] / gauges["blocks"]
        return shares

    def set_mode(self, mode: Mode) -> None:
        """Switch every engine, and wait until router and engines act by it.

        Raises:
            EngineFault: an engine stays in another mode, and says why.
        """
        for engine in self.stack.engines:
            if engine.control_address is not None:
                reply = switch_mode(
                    self._control, engine.control_address, mode.value, timeout_s=_ASK_TIMEOUT_S
                )
                if reply.mode != mode.value:
                    raise EngineFault(
                        engine.name, f"stays in mode {reply.mode}: {reply.why or 'no reason'}"
                    )
        if self.stack.spec.is_pair:
            self._until_router_knows(pulls=mode is Mode.ON)
        # An engine takes the switch with its next step: that of a call of somebody else.
        self.caller.fill([{"role": "user", "content": "Hello."}], f"switch-{mode.value}")

    def _until_router_knows(self, *, pulls: bool) -> None:
        deadline = time.monotonic() + _SWITCH_S
        while True:
            sides = json.loads(_get(f"{self.stack.base_url}/health"))["sides"].values()
            if all((side["pulling"] == side["engines"]) is pulls for side in sides):
                return
            if time.monotonic() > deadline:
                raise EngineFault("router", f"does not notice the engines' mode: {sides}")
            time.sleep(_SETTLE_EVERY_S)

    def set_return(self, *, enabled: bool) -> None:
        """Switch returns in the router."""
        _post(f"{self.stack.base_url}/admin/return", {"enabled": enabled})

    def count_tokens(self, text: str) -> int:
        """Ask the prefilling engine's tokenizer."""
        answer = _post(
            f"{self._prefill.url}/tokenize", {"prompt": text, "add_special_tokens": False}
        )
        return int(answer["count"])

    def stop(self) -> None:
        """End the stack and close what asked it."""
        if not self._stopped:
            self._stopped = True
            self.caller.close()
            if self.returning is not None:
                self.returning.close()
            self._control.close()
            self.stack.stop()


class Starter(Protocol):
    """Starts rigs."""

    def __call__(self, engines: Engines, sizes: Sizes) -> Rig:
        """Start engines and return when they answer."""
        ...


def stack_spec(engines: Engines, sizes: Sizes, *, python: str, log_dir: Path) -> StackSpec:
    """Return what the demo starts: small pools of equal size, float32."""
    kind = _KINDS[engines]
    pair = NUM_ENGINES[engines] > 1
    sides = ("prefill", "decode") if pair else ("single",)
    ours = kind == "turncache"
    return StackSpec(
        model=MODEL,
        kind=kind,
        prefill=int(pair),
        decode=NUM_ENGINES[engines] - 1,
        stock_returns=() if ours else _STOCK_RETURNS,
        router_port=0,
        dtype="float32",
        max_model_len=sizes.max_model_len,
        num_blocks=dict.fromkeys(sides, sizes.num_blocks),
        engine_args=("--max-num-seqs", "8"),
        settings=_SETTINGS if ours else {},
        router_settings={"admin": True} if ours else {},
        # The agent waits for every answer: prefill and decode never work at the same time.
        share_cores=True,
        # The arms warm up themselves, each in the way that it is measured.
        warm_up=False,
        log_dir=log_dir,
        python=python,
    )


class StackStarter:
    """Starts stacks with the launcher.

    Args:
        log_dir: folder for the logs, one below it per stack.
        progress: takes lines for people.
        started: told of every rig before it is used.
        python: interpreter of the engine environment.
    """

    def __init__(
        self,
        log_dir: Path,
        progress: Callable[[str], None],
        *,
        started: Callable[[Stack], None],
        python: str = sys.executable,
    ) -> None:
        self._log_dir = log_dir
        self._progress = progress
        self._started = started
        self._python = python

    def __call__(self, engines: Engines, sizes: Sizes) -> StackRig:
        """Start a stack."""
        log_dir = self._log_dir / engines.value
        spec = stack_spec(engines, sizes, python=self._python, log_dir=log_dir)
        stack = start(spec, progress=self._progress)
        self._started(stack)
        return StackRig(stack)


def settled(read: Callable[[], PromptTokens], before: PromptTokens, num: int) -> PromptTokens:
    """Return what was counted since ``before``, when it has reached ``num`` prompt tokens.

    vLLM counts a step after it has handed its tokens out, so a reading right after the
    answer may come too early.

    Raises:
        EngineFault: the counters never get there, or beyond.
    """
    deadline = time.monotonic() + _SETTLE_S
    counted = read() - before
    while counted.total != num and time.monotonic() < deadline:
        time.sleep(_SETTLE_EVERY_S)
        counted = read() - before
    if counted.total != num:
        raise EngineFault(
            "prefill",
            f"its counters show {counted.total} prompt tokens for a call of {num}: something "
            "else uses this engine, or vllm:prompt_tokens_by_source means something new",
        )
    return counted


def _get(url: str) -> str:
    return _http(urllib.request.Request(url))  # noqa: S310 - our own loopback URLs


def _post(url: str, body: Mapping[str, Any]) -> dict[str, Any]:
    request = urllib.request.Request(  # noqa: S310 - our own loopback URLs
        url, data=json.dumps(body).encode(), headers={"content-type": "application/json"}
    )
    answer: dict[str, Any] = json.loads(_http(request))
    return answer


def _http(request: urllib.request.Request) -> str:
    try:
        with urllib.request.urlopen(request, timeout=_HTTP_TIMEOUT_S) as answer:  # noqa: S310
            text: str = answer.read().decode()
            return text
    except (urllib.error.URLError, OSError) as error:
        raise EngineFault(request.full_url, f"no usable answer: {error}") from error
