"""From the end of a dead engine's log to what was wrong and what to do. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Why a program ended, in words.

    Attributes:
        what: one sentence, empty when the log holds no sign that we know.
        way_out: what to do about it.
        line: of the log, in which the sign was found; often far above the end.
        is_usage: the command line was wrong, no engine is to blame.
    """

    what: str
    way_out: str
    line: str = ""
    is_usage: bool = False


@dataclass(frozen=True, slots=True)
class _Sign:
    pattern: re.Pattern[str]
    what: str
    way_out: str
    is_usage: bool = False


def _sign(pattern: str, what: str, way_out: str, *, is_usage: bool = False) -> _Sign:
    return _Sign(re.compile(pattern, re.IGNORECASE), what, way_out, is_usage)


#: What vLLM tries to import and does without is no cause.
_SERIOUS: Final = r"^(?!.*(failed to import|warning)).*"
#: Looked for in this order: the specific before the general.
_SIGNS: Final = (
    _sign(
        r"error: unrecognized arguments: (?P<detail>.+)",
        "vLLM knows no such flag: {detail}",
        "see the flags of vllm serve --help",
        is_usage=True,
    ),
    _sign(
        r"^\S*api_server\.py: error: (?P<detail>.+)",
        "vLLM refuses its command line: {detail}",
        "see the flags of vllm serve --help",
        is_usage=True,
    ),
    _sign(
        r"address already in use",
        "a port that it needs is in use",
        "stop what uses it, or move the base ports",
    ),
    _sign(
        r"No module named '?(?P<detail>vllm)'?(?![\w.])",
        "vLLM is not installed in the engine environment",
        "install it there, or name another interpreter with --python",
    ),
    _sign(
        r"No module named '?(?P<detail>turncache\w*)",
        "turncache is not installed in the engine environment",
        "pip install --no-deps turncache there",
    ),
    _sign(
        _SERIOUS + r"No module named '?(?P<detail>vllm\.[\w.]+)"
        r"|cannot import name .* from '(?P<name>vllm\.[\w.]+)'",
        "this vLLM lacks what turncache needs of it: {detail}{name}",
        "install a vLLM that `turncache doctor` lists as tested, or start without turncache",
    ),
    _sign(
        r"NIXL is not available|No module named '?nixl",
        "NIXL is not installed in the engine environment",
        "pip install nixl there",
    ),
    _sign(
        _SERIOUS + r"No module named '?(?P<detail>[\w.]+)",
        "the module {detail} is missing",
        "install it into the environment of this program",
    ),
    _sign(
        r"(?P<detail>\S+) is not a local folder and is not a valid model identifier"
        r"|Repository Not Found|couldn't connect to .*huggingface|Can't load the configuration"
        r"|offline mode is enabled",
        "the model cannot be loaded",
        "name a folder that holds config.json and weights, or a model of the hub",
    ),
    _sign(
        r"model architectures? .* (are|is) not supported|does not recognize this architecture",
        "this vLLM does not know the model's architecture",
        "use another model or another vLLM",
    ),
    _sign(
        r"larger than the maximum number of tokens that can be stored in KV cache"
        r"|estimated maximum model length|KV cache is needed, which is larger than",
        "one sequence of the model's full length does not fit into the KV space",
        "lower --max-model-len, or raise the KV space or the number of blocks",
    ),
    _sign(
        r"less than desired (GPU|CPU) memory|out of memory|MemoryError|Cannot allocate memory"
        r"|No available memory for the cache blocks|not enough memory",
        "there is too little memory",
        "close other programs, use a smaller model, or lower the KV space "
        "(CPU: --kv-space-gib, GPU: -- --gpu-memory-utilization)",
    ),
)
_KILLED: Final = Explanation(
    what="something killed it with signal 9, as the kernel does when memory runs out",
    way_out="look at dmesg; close other programs, or use a smaller model or KV space",
)


def explain(lines: Sequence[str], exit_code: int | None) -> Explanation:
    """Find the first sign that we know in the end of a log."""
    for sign in _SIGNS:
        for line in reversed(lines):
            found = sign.pattern.search(line)
            if found:
                named = {name: (text or "").strip() for name, text in found.groupdict().items()}
                return Explanation(
                    what=sign.what.format(**named),
                    way_out=sign.way_out,
                    line=line.strip(),
                    is_usage=sign.is_usage,
                )
    if exit_code == 128 + 9:
        return _KILLED
    return Explanation(what="", way_out="its log says more")
