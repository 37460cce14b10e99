"""Finished blocks in a file, so that an interrupted run goes on where it stopped."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from turncache.errors import UsageError, why_of
from turncache_tools.bench.results import BlockResult

_SCHEMA: Final = "turncache-bench-blocks/2"


class SavedBlocks:
    """One file of JSON Lines: what is run, then a line for each block that has ended.

    Args:
        path: None keeps nothing.
        plan: what is run; a file of another plan is refused.

    Raises:
        UsageError: the file is of another plan, none of ours, or cannot be used.
    """

    def __init__(self, path: Path | None, plan: Mapping[str, Any]) -> None:
        self._path = path
        self.blocks: dict[int, BlockResult] = {}
        if path is None:
            return
        head = json.dumps({"schema": _SCHEMA, "plan": plan}, sort_keys=True)
        try:
            lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
            if not lines:
                path.write_text(head + "\n", encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise UsageError(f"--resume {path}: cannot be used: {why_of(error)}") from error
        if lines and lines[0] != head:
            raise UsageError(
                f"--resume {path}: begun with other options or another stack; go on with the same "
                "ones, or name another file"
            )
        self._read(lines[1:])

    def _read(self, lines: list[str]) -> None:
        for number, line in enumerate(lines, 2):
            try:
                block = BlockResult.from_dict(json.loads(line))
            except (ValueError, TypeError, KeyError) as error:
                if number == len(lines) + 1:
                    # Cut off when the run was ended: that block is run again.
                    self._rewrite()
                    return
                raise UsageError(
                    f"--resume {self._path}, line {number}: cannot be read: {error}"
                ) from error
            self.blocks[block.number] = block

    def _rewrite(self) -> None:
        assert self._path is not None
        head = self._path.read_text(encoding="utf-8").split("\n", 1)[0]
        lines = [head, *(json.dumps(block.to_dict()) for block in self.blocks.values())]
        self._path.write_text("\n".join(lines) + "\n", encoding="utf-8")

    def add(self, block: BlockResult) -> None:
        """Keep a block that has ended."""
        self.blocks[block.number] = block
        if self._path is not None:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(block.to_dict()) + "\n")
