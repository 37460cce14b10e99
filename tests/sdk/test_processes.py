"""Processes: pickling, fork, spawn, and workers that take tasks from a queue."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
from concurrent.futures import ProcessPoolExecutor
from multiprocessing.context import BaseContext

import openai
import pytest

import turncache
from tests.sdk.support import HELLO, said, session_ids, user
from turncache.testing import FakeServer

# Python 3.12 and later warn about every fork of a process with threads.
pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.fixture(params=["fork", "spawn"])
def context(request: pytest.FixtureRequest) -> BaseContext:
    """Give each way to start a process."""
    return multiprocessing.get_context(request.param)


def work(url: str, task: turncache.Session | str | None, num_calls: int = 1) -> str:
    """Stand for a task of a worker: make a client, and call in the session that was sent."""
    with turncache.OpenAI(base_url=url, api_key="-") as client:
        session = turncache.session(task) if isinstance(task, str) else task
        for _ in range(num_calls):
            if session is None:
                client.chat.completions.create(model="m", messages=HELLO)
            else:
                with session:
                    client.chat.completions.create(model="m", messages=HELLO)
        current = turncache.current_session()
        return "none" if current is None else current.id


def test_a_session_travels_to_a_worker(context: BaseContext, server: FakeServer) -> None:
    """A task's argument may be the session or its id: the worker's calls carry it."""
    session = turncache.session("ticket", retain_s=300, priority=80)
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        assert pool.submit(work, server.url, session).result(50) == "none"
        assert pool.submit(work, server.url, session.id).result(50) == "none"
    assert session_ids(server.requests) == ["ticket", "ticket"]
    assert "retain=300.0, priority=80" in server.requests[0].headers["turncache"]


def test_a_worker_keeps_no_session_between_tasks(context: BaseContext, server: FakeServer) -> None:
    """One process, many tasks: none sees the session of the task before it."""
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        for task in ("first", None, "second", None):
            assert pool.submit(work, server.url, task).result(50) == "none"
    first, none, second, none_again = session_ids(server.requests)
    assert (first, second) == ("first", "second")
    for automatic in (none, none_again):
        assert automatic is not None
        assert automatic.startswith("auto-")
    assert none != none_again, "two clients follow two conversations"


def test_a_task_that_is_delivered_again_says_the_same(server: FakeServer) -> None:
    """A queue may deliver twice, to another process: turn, call and cause are equal."""
    pool_context = multiprocessing.get_context("spawn")
    for _ in range(2):
        with ProcessPoolExecutor(1, mp_context=pool_context) as pool:
            pool.submit(work, server.url, "ticket").result(50)
    first, again = server.requests
    assert said(first) == said(again) == (1, 1, "user")


class Prefork:
    """A worker that opens its client and a session before it forks, as prefork servers do."""

    client: turncache.OpenAI

    @classmethod
    def task(cls, name: str | None) -> None:
        with (
            openai.DefaultHttpxClient() as http_client,
            cls.client.with_options(http_client=http_client) as own,
        ):
            messages = [user(f"task {name}")]
            if name is None:
                own.chat.completions.create(model="m", messages=messages)
            else:
                with turncache.session(name):
                    own.chat.completions.create(model="m", messages=messages)


def test_forked_workers_share_no_automatic_session(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """The same conversation in two children of one process is two sessions."""
    Prefork.client = client
    client.chat.completions.create(model="m", messages=[user("task None")])
    context = multiprocessing.get_context("fork")
    children = [context.Process(target=Prefork.task, args=(None,)) for _ in range(2)]
    for child in children:
        child.start()
        child.join(30)
    assert [child.exitcode for child in children] == [0, 0]
    assert len(set(session_ids(server.requests))) == 3


def test_forked_workers_do_not_inherit_an_open_block_of_another(
    client: turncache.OpenAI, server: FakeServer
) -> None:
    """A child forked inside a block goes on in it; its own block is nearer."""
    Prefork.client = client
    context = multiprocessing.get_context("fork")
    with turncache.session("parent"):
        children = [context.Process(target=Prefork.task, args=(name,)) for name in ("own", None)]
        for child in children:
            child.start()
            child.join(30)
    assert session_ids(server.requests) == ["own", "parent"]


def test_a_session_is_one_object_per_process() -> None:
    """Copies and pickles of a session lead to the same object and the same counts here."""
    session = turncache.session("ticket")
    assert copy.copy(session) is copy.deepcopy(session) is session
    assert pickle.loads(pickle.dumps(session)) is session
    child = session.child("researcher")
    assert pickle.loads(pickle.dumps(child)).parent_id == "ticket"
