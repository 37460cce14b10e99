"""The agent's script: which tool it uses next. The tools are real, so is what they return.

The folder that it reads is the standard library of the running Python: text that every
machine has, the same for one Python version. What the agent *says* is the model's own.
"""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Final

from turncache.errors import EnvironmentFault

SYSTEM: Final = (
    "You are an agent that surveys Python's standard library. You read what your tools return "
    "and answer each question in one short sentence."
)
TASK: Final = (
    "Survey the standard library for a colleague who has to choose between its modules. "
    "Begin with these two files."
)
FIRST_QUESTION: Final = "What does sched.py do?"
#: Files whose start is given with the task.
FIRST_FILES: Final = ("sched.py", "queue.py")


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One use of a tool, and what the agent wants to know from its result.

    Attributes:
        tool: its name.
        arguments: as the model would send them.
        question: put to the model below the result.
    """

    tool: str
    arguments: Mapping[str, str | int]
    question: str

    @property
    def is_long(self) -> bool:
        """The tool takes long: a search does, looking at one file does not."""
        return self.tool == "search"

    @property
    def shown(self) -> str:
        """The use in one line, for people."""
        return f"{self.tool} {' '.join(str(value) for value in self.arguments.values())}"


def _step(tool: str, question: str, **arguments: str | int) -> Step:
    return Step(tool=tool, arguments=MappingProxyType(arguments), question=question)


STEPS: Final = (
    _step("read_file", "What is heapq.py for?", path="heapq.py"),
    _step("search", "What can statistics.py compute?", word="Return ", path="statistics.py"),
    _step("read_file", "What is a shelf?", path="shelve.py"),
    _step("list_folder", "What is in the folder asyncio?", path="asyncio"),
    _step("read_file", "What does subprocess.py let you do?", path="subprocess.py", line=10),
    _step("search", "What does calendar.py offer?", word="Return ", path="calendar.py"),
    _step("read_file", "What is bisect.py for?", path="bisect.py"),
    _step("list_folder", "What is in the folder email?", path="email"),
    _step("read_file", "What does tempfile.py provide?", path="tempfile.py"),
    _step("read_file", "What is secrets.py for?", path="secrets.py"),
    _step("search", "What can shutil.py do?", word='"""', path="shutil.py"),
)
#: What the last call brings when it is made again: the same question, another search.
OTHER_LAST_STEPS: Final = (
    _step("search", "What can shutil.py do?", word="def ", path="shutil.py"),
    _step("search", "What can shutil.py do?", word="return ", path="shutil.py"),
)
#: How often arms that take turns make the last call of a pair. A limit rests on that call, and
#: the time of one call of half a second says little.
NUM_TAKES: Final = 1 + len(OTHER_LAST_STEPS)


def last_steps(num_calls: int) -> tuple[Step, ...]:
    """Return the steps of a task of ``num_calls`` calls; a short one ends as the whole does."""
    return STEPS[len(STEPS) - (num_calls - 1) :]


class Tools:
    """The agent's tools, on one folder.

    Args:
        folder: what they may read; by default the standard library.

    Raises:
        EnvironmentFault: the folder lacks the files that the script reads.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(sysconfig.get_paths()["stdlib"])
        missing = [name for name in FIRST_FILES if not (self._folder / name).is_file()]
        if missing:
            raise EnvironmentFault(
                f"the demo's agent reads the source of Python's standard library, and "
                f"{self._folder} has no {', '.join(missing)}: use a Python that ships it"
            )

    def run(self, step: Step) -> str:
        """Run one step and return the tool's whole result."""
        tools: dict[str, Callable[..., str]] = {
            "list_folder": self.list_folder,
            "read_file": self.read_file,
            "search": self.search,
        }
        return tools[step.tool](**step.arguments)

    def list_folder(self, path: str) -> str:
        """List a folder: name and size of every Python file in it."""
        files = sorted((self._folder / path).glob("*.py"))
        return "\n".join(f"{path}/{file.name}  {file.stat().st_size} bytes" for file in files)

    def read_file(self, path: str, line: int = 1) -> str:
        """Read a file from a line on."""
        lines = (self._folder / path).read_text(encoding="utf-8").splitlines()
        return "\n".join(lines[line - 1 :])

    def search(self, word: str, path: str) -> str:
        """List the lines of a file that contain a word, with their numbers."""
        lines = (self._folder / path).read_text(encoding="utf-8").splitlines()
        found = [f"{path}:{at}: {text}" for at, text in enumerate(lines, 1) if word in text]
        return "\n".join(found)


def first_text(tools: Tools) -> str:
    """Return what is given with the task, whole."""
    return "\n\n".join(f"File {name}:\n{tools.read_file(name)}" for name in FIRST_FILES)


def other_text(tools: Tools) -> str:
    """Return text that the other sessions' prompts are cut from."""
    return tools.read_file("argparse.py") + "\n" + tools.read_file("typing.py")


_WORD_END: Final = re.compile(r"\s")


def cut(text: str, num_tokens: int, count: Callable[[str], int]) -> str:
    """Cut ``text`` at a word's end so that it has about ``num_tokens`` tokens, never more.

    Args:
        text: what to cut.
        num_tokens: most tokens of the result.
        count: the model's own tokenizer.
    """
    # Four characters a token is usual; start with room to spare and close in.
    candidate = text[: num_tokens * 6]
    while (num := count(candidate)) > num_tokens:
        shorter = min(int(len(candidate) * num_tokens / num), len(candidate) - 1)
        candidate = candidate[:shorter]
    ends = [match.start() for match in _WORD_END.finditer(candidate)]
    cut_short = len(candidate) < len(text)
    return candidate[: ends[-1]] if cut_short and ends else candidate
