"""The command line that the LangGraph examples share, and the tables that they end with."""

from __future__ import annotations

import argparse
import os
import sys
import uuid
from collections.abc import Callable, Sequence

import openai

import turncache
from turncache.langgraph import thread_session


def parse(about: str | None, question: str, arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--base-url", default="http://localhost:8000/v1")
    parser.add_argument("--api-key", default=os.environ.get("OPENAI_API_KEY") or "-")
    parser.add_argument("--model", default="tiny")
    parser.add_argument("--question", default=question)
    parser.add_argument("--tool-seconds", type=float, default=2.0)
    parser.add_argument("--thread", default=f"example-{uuid.uuid4().hex[:8]}")
    return parser.parse_args(arguments)


def run(main: Callable[[], None]) -> None:
    """Run an example as a program: what the server does not do is one line."""
    try:
        main()
    except openai.APIConnectionError as error:
        sys.exit(f"no answer from {error.request.url}: {error.__cause__ or error}")
    except openai.APIStatusError as error:
        sys.exit(f"{error.request.url} refuses: {' '.join(error.message.split())[:300]}")
    except turncache.TurncacheError as error:
        sys.exit(str(error))


def show(thread: str) -> None:
    """Print what happened to the KV: of the thread, then of its children."""
    session = thread_session(thread)
    for each in (session, *session.children):
        print(each)
        print()
