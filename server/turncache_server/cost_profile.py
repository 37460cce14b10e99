"""A cost profile: what host work, prefill, transfers and decode of one model on one rig cost.

Written by ``turncache calibrate``, made of published numbers by ``turncache plan --prior``, read
by the planner and, through the setting ``cost_profile``, by the connector. Pure but for
:func:`load_profile`. The formulas, in seconds and tokens::

    host      host_s + host_token_s * prompt
    prefill   prefill_token_s * computed + prefill_pair_s * pairs
    pairs     over all computed tokens, how many tokens each attends to: the tokens before it,
              at most attended_tokens of them (0: all)
    pull      pull_latency_s + pull_token_s * pulled
    load      load_latency_s + load_token_s * loaded, from a host tier
    decode    decode_token_s * answer

A file is TOML with these names and one ``[[points]]`` table per measurement of the fit.

Version history of :data:`SCHEMA`:

1. first version.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Final

from turncache.errors import ConfigError, why_of
from turncache.spelling import no_such

NAME: Final = "turncache-profile"
SCHEMA: Final = f"{NAME}/1"
#: Where a profile's numbers come from.
CALIBRATED: Final = "calibrated"
PRIOR: Final = "prior"
#: Of loads from a host tier, which nobody has measured: a latency, and bytes per second of one
#: accelerator.
ASSUMED_LOAD_LATENCY_S: Final = 0.01
ASSUMED_LOAD_BYTES_PER_S: Final = 25e9
#: A threshold beyond this means that pulling does not pay.
_LONGEST: Final = 1 << 22


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfilePoint:
    """One measurement that a profile was fitted to.

    Attributes:
        kind: ``cold``, ``cached`` or ``returned``.
        prompt_tokens: of the prompt.
        returned_tokens: of these, returned by decode.
        computed_tokens: likewise, computed.
        measured_ms: median time to first token.
        fitted_ms: by the profile.
        spread: longest less shortest repetition, as a share of the median.
    """

    kind: str
    prompt_tokens: int
    returned_tokens: int
    computed_tokens: int
    measured_ms: float
    fitted_ms: float
    spread: float

    @property
    def error(self) -> float:
        """Fitted against measured, as a share of measured."""
        return self.fitted_ms / self.measured_ms - 1


@dataclass(frozen=True, slots=True, kw_only=True)
class CostProfile:
    """Costs of one model on one rig; the module's docstring has the formulas.

    Attributes:
        name: of the profile.
        model: as it is served, or as it is published.
        source: ``calibrated`` (measured on a running stack) or ``prior``.
        about: what it was measured on, or where the numbers come from.
        engines: engine ids it was measured on.
        accelerators: per prefill engine.
        host_s: per call, whatever its length.
        host_token_s: per token of the prompt, computed or not.
        prefill_token_s: per computed token.
        prefill_pair_s: per computed token and token that it attends to.
        attended_tokens: most tokens that one attends to, 0 for all.
        pull_latency_s: per pull, None where engines do not pull.
        pull_token_s: per pulled token, likewise.
        load_latency_s: per load from a host tier; assumed, as everywhere.
        load_token_s: per token loaded from there, likewise.
        decode_token_s: per token of an answer.
        kv_token_bytes: KV of a token over all ranks, 0 when unknown.
        block_tokens: of a KV block.
        pool_tokens: of the prefill (or only) engine, None when unknown.
        decode_pool_tokens: of the decode engine, likewise.
        points: measurements.
    """

    name: str
    model: str
    source: str
    about: str
    engines: tuple[str, ...] = ()
    accelerators: int = 1
    host_s: float
    host_token_s: float
    prefill_token_s: float
    prefill_pair_s: float
    attended_tokens: int = 0
    pull_latency_s: float | None = None
    pull_token_s: float | None = None
    load_latency_s: float = 0.0
    load_token_s: float = 0.0
    decode_token_s: float
    kv_token_bytes: int = 0
    block_tokens: int = 16
    pool_tokens: int | None = None
    decode_pool_tokens: int | None = None
    points: tuple[ProfilePoint, ...] = ()

    @property
    def pulls(self) -> bool:
        """Say whether engines pull from each other."""
        return self.pull_latency_s is not None and self.pull_token_s is not None

    def host_work_s(self, prompt: int) -> float:
        """Return what a prompt costs before and beside the accelerator."""
        return self.host_s + self.host_token_s * prompt

    def pairs(self, start: int, tokens: int) -> float:
        """Return how many tokens ``tokens`` tokens behind ``start`` attend to, all together."""
        return self._attended(start + tokens) - self._attended(start)

    def _attended(self, end: int) -> float:
        most = self.attended_tokens
        if not most or end <= most:
            return end * end / 2
        return most * most / 2 + most * (end - most)

    def compute_s(self, start: int, tokens: int) -> float:
        """Return the accelerator's time to compute ``tokens`` tokens behind ``start``."""
        return self.prefill_token_s * tokens + self.prefill_pair_s * self.pairs(start, tokens)

    def pull_s(self, tokens: int) -> float:
        """Return how long a pull takes; without end where engines do not pull."""
        if self.pull_latency_s is None or self.pull_token_s is None:
            return math.inf
        return self.pull_latency_s + self.pull_token_s * tokens

    def load_s(self, tokens: int) -> float:
        """Return how long a load from a host tier takes."""
        return self.load_latency_s + self.load_token_s * tokens

    def break_even_tokens(self, start: int) -> int | None:
        """Return from how many tokens behind ``start`` pulling is cheaper; None for never."""
        if not self.pulls:
            return None
        low, high = 0, 1
        while self.pull_s(high) > self.compute_s(start, high):
            low, high = high, high * 2
            if high > _LONGEST:
                return None
        while high - low > 1:
            middle = (low + high) // 2
            dearer = self.pull_s(middle) > self.compute_s(start, middle)
            low, high = (middle, high) if dearer else (low, middle)
        return high


def dump_profile(profile: CostProfile) -> str:
    """Return a profile as TOML."""
    lines = [f"schema = {_toml(SCHEMA)}"]
    for each in fields(CostProfile):
        value = getattr(profile, each.name)
        if each.name != "points" and value is not None:
            lines.append(f"{each.name} = {_toml(value)}")
    for point in profile.points:
        lines += ["", "[[points]]"]
        lines += [f"{each.name} = {_toml(getattr(point, each.name))}" for each in fields(point)]
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, str):
        kept = "".join(char if char.isprintable() else " " for char in value)
        escaped = kept.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{escaped}"'
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return repr(value)


def load_profile(path: Path) -> CostProfile:
    """Read a profile from a file.

    Raises:
        ConfigError: it cannot be read, or is none that this version knows.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(str(path), f"cannot be read: {why_of(error)}") from error
    return parse_profile(text, name=str(path))


def parse_profile(text: str, *, name: str) -> CostProfile:
    """Read a profile.

    Args:
        text: TOML.
        name: of the file, for messages.

    Raises:
        ConfigError: naming the member and what was expected.
    """
    try:
        found = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(name, f"no TOML: {error}") from error
    schema = found.pop("schema", None)
    if schema != SCHEMA:
        raise ConfigError(
            name,
            f"its schema is {schema!r}, expected {SCHEMA!r}: write it anew with turncache "
            "calibrate, or read it with the version that wrote it",
        )
    points = found.pop("points", [])
    if not isinstance(points, list) or not all(isinstance(point, dict) for point in points):
        raise ConfigError(name, "points: expected tables")
    values = _values(CostProfile, found, name)
    if values["source"] not in (CALIBRATED, PRIOR):
        raise ConfigError(name, f"source {values['source']!r}: expected {CALIBRATED} or {PRIOR}")
    read = tuple(
        ProfilePoint(**_values(ProfilePoint, point, f"{name}, point {number}"))
        for number, point in enumerate(points, 1)
    )
    return CostProfile(**{**values, "points": read})


def _values(kind: Any, found: Mapping[str, Any], name: str) -> dict[str, Any]:
    known = {each.name: each for each in fields(kind)}
    for member in found:
        if member not in known:
            raise ConfigError(name, f"{member}: {no_such('member', member, known)}")
    out: dict[str, Any] = {}
    for member, each in known.items():
        if member in found:
            out[member] = _value(found[member], str(each.type), f"{name}, {member}")
        elif each.default is MISSING:
            raise ConfigError(name, f"{member} is missing")
    return out


def _value(value: object, annotation: str, name: str) -> Any:
    kind = annotation.removesuffix(" | None")
    if kind == "str":
        legal = isinstance(value, str)
    elif kind.startswith("tuple"):
        legal = isinstance(value, list) and all(isinstance(each, str) for each in value)
        value = tuple(value) if isinstance(value, list) else value
    else:
        allowed = (int,) if kind == "int" else (int, float)
        legal = isinstance(value, allowed) and not isinstance(value, bool)
        legal = legal and 0 <= value < 1e15  # type: ignore[operator]
    if not legal:
        expected = {"str": "text", "int": "a whole number from 0", "float": "a number from 0"}
        raise ConfigError(name, f"{value!r}: expected {expected.get(kind, 'a list of texts')}")
    return value
