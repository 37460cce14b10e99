"""vLLM's own counters of where prompts' tokens came from: the witness beside the outcome. Pure."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_NAME: Final = "vllm:prompt_tokens_by_source"
_LINE: Final = re.compile(
    rf'^{_NAME}(?:_total)?\{{(?:[^}}]*,)?source="(?P<source>\w+)"[^}}]*\}} (?P<value>\S+)$',
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptTokens:
    """Prompt tokens of an engine by source, since its start or between two readings."""

    computed: int = 0
    local: int = 0
    external: int = 0

    @property
    def total(self) -> int:
        """All prompt tokens."""
        return self.computed + self.local + self.external

    def __sub__(self, earlier: PromptTokens) -> PromptTokens:
        return PromptTokens(
            computed=self.computed - earlier.computed,
            local=self.local - earlier.local,
            external=self.external - earlier.external,
        )


def read_prompt_tokens(metrics: str) -> PromptTokens:
    """Read the counters out of ``/metrics``; sources that are not there yet are 0."""
    found = {"local_compute": 0.0, "local_cache_hit": 0.0, "external_kv_transfer": 0.0}
    for match in _LINE.finditer(metrics):
        if match["source"] in found:
            found[match["source"]] += float(match["value"])
    return PromptTokens(
        computed=int(found["local_compute"]),
        local=int(found["local_cache_hit"]),
        external=int(found["external_kv_transfer"]),
    )
