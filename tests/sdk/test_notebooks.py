"""Notebooks: cells one after the other, with ``await`` at the top level of a running loop.

The cells run in the standard library's own console of that kind, ``python -m asyncio``.
"""

from __future__ import annotations

import subprocess
import sys

from tests.sdk.support import said, session_ids
from turncache.testing import FakeServer

CELLS = """
import sys, turncache
client = turncache.AsyncOpenAI(base_url={url!r}, api_key="-")
messages = [dict(role="user", content="hello")]
async def ask(): return await client.chat.completions.create(model="m", messages=messages)

answer = await ask()
answer = await ask()
messages += [answer.choices[0].message, dict(role="user", content="more")]
answer = await ask()
opened = turncache.session("entered").__enter__()
answer = await ask()
async with turncache.session("block"): answer = await ask()

plain, client = client, client.with_session("ticket")
answer = await ask()
none = opened.__exit__(None, None, None)
print("HTML", "<table" in turncache.session("block")._repr_html_())
print("CURRENT", turncache.current_session())
await plain.close()
"""


def test_cells_of_a_notebook(server: FakeServer) -> None:
    """A cell that is run again is the same call. A block is its cell's: one that is entered by
    hand does not reach the next cells, which have contexts of their own, and with_session() does.
    """
    done = subprocess.run(
        [sys.executable, "-m", "asyncio"],
        input=CELLS.format(url=server.url),
        env={"PYTHONPATH": ":".join(sys.path)},
        capture_output=True,
        text=True,
        check=True,
        timeout=50,
    )
    assert "Error" not in done.stderr
    calls = [request for request in server.requests if request.path.endswith("/completions")]
    first, again, more, entered, block, own = session_ids(calls)
    assert first == again == more == entered
    assert str(first).startswith("auto-")
    assert [said(request) for request in calls[:3]] == [
        (1, 1, "user"),
        (1, 1, "user"),
        (2, 1, "user"),
    ]
    assert (block, own) == ("block", "ticket")
    assert "HTML True" in done.stdout
    assert "CURRENT None" in done.stdout
