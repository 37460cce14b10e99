"""Keys, tenants, and what separates them."""

from __future__ import annotations

import json
import logging
import ssl
import stat
from pathlib import Path
from typing import Any

import httpx2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.fakes.certificate import CERTIFICATE, NEXT_CERTIFICATE, NEXT_PRIVATE_KEY, PRIVATE_KEY
from tests.fakes.engine import FakeEngine, fake_engines, fake_pair
from tests.server.router.support import MESSAGES, Bench, bench, config_for, outcome_of
from turncache.errors import ConfigError
from turncache_server.router.app import serving
from turncache_server.router.config import parse_config
from turncache_server.router.keys import (
    Caller,
    KeyFile,
    add_key,
    digest_of,
    parse_keys,
    read_keys,
    salt_of,
)

pytestmark = pytest.mark.anyio


@pytest.fixture
def keys(tmp_path: Path) -> dict[str, str]:
    """A keys file with two tenants and an administrator: key by name, and the file."""
    path = tmp_path / "keys.toml"
    made = {name: add_key(path, name) for name in ("red", "blue")}
    return {**made, "admin": add_key(path, "ops", admin=True), "file": str(path)}


async def ask(running: Bench, key: str | None, **members: Any) -> httpx2.Response:
    """Make a call with a key, in the session ``s`` unless another is named."""
    headers = {} if key is None else {"Authorization": f"Bearer {key}"}
    return await running.chat(headers=headers, **{"session": "s", **members})


# --- the file -------------------------------------------------------------------------------


def test_a_key_is_kept_nowhere(tmp_path: Path) -> None:
    """The file holds digests, for its owner only; the key is printed once."""
    path = tmp_path / "keys.toml"
    key = add_key(path, "red")
    assert key not in path.read_text()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert read_keys(path) == {digest_of(key): Caller(tenant="red")}
    assert add_key(path, "red") != key
    assert len(read_keys(path)) == 2


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("keys = 3", r"expected \[\[keys\]\] tables"),
        ("[[keys]]\ntenant = 'a'", "sha256"),
        ("[[keys]]\ntenant = 'a'\nsha256 = 'tc-secret'", "64 hexadecimal digits"),
        (f"[[keys]]\ntenant = 'a b'\nsha256 = '{'0' * 64}'", "'a b'"),
        (f"[[keys]]\ntenant = 'a'\nsha256 = '{'0' * 64}'\nadmin = 1", "true or false"),
        (f"[[keys]]\ntenant = 'a'\nsha256 = '{'0' * 64}'\nrole = 'x'", "role"),
        (f"[[keys]]\ntenant = 'a'\nsha256 = '{'0' * 64}'\n" * 2, "twice"),
        ("[[keys", "no TOML"),
    ],
)
def test_a_file_that_is_none_is_refused(text: str, word: str) -> None:
    """The entry is named, a key that was put there by mistake is not shown."""
    with pytest.raises(ConfigError, match=word) as caught:
        parse_keys(text)
    assert "tc-secret" not in str(caught.value)


@given(st.text(max_size=200))
def test_any_text_is_keys_or_refused(text: str) -> None:
    """Nothing but ConfigError comes out of a file that somebody has edited."""
    try:
        parse_keys(text)
    except ConfigError:
        return


def test_a_file_that_others_can_write_is_refused(tmp_path: Path) -> None:
    """Whoever can write it can let anybody in."""
    path = tmp_path / "keys.toml"
    add_key(path, "red")
    path.chmod(0o620)
    with pytest.raises(ConfigError, match="chmod go-w"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot read"):
        read_keys(tmp_path / "none.toml")


def test_changes_are_followed_and_a_broken_file_is_not(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """New keys count within a second; a slip of an editor changes nothing, and is said."""
    path, now = tmp_path / "keys.toml", [0.0]
    first = add_key(path, "red")
    file = KeyFile(path, lambda: now[0])
    second = add_key(path, "blue")
    assert file.caller_of(second) is None
    now[0] = 2.0
    assert file.caller_of(second) == Caller(tenant="blue")
    path.write_text("[[keys")
    now[0] = 4.0
    with caplog.at_level(logging.ERROR):
        assert file.caller_of(first) == Caller(tenant="red")
    assert "no TOML" in caplog.text
    path.unlink()
    now[0] = 6.0
    assert file.caller_of(first) == Caller(tenant="red")


# --- who is served --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": "Bearer nobody"},
        {"x-api-key": "nobody"},
        {"Authorization": "Basic cmVkOg=="},
    ],
)
async def test_without_a_key_nothing_is_served(keys: dict[str, str], headers: Any) -> None:
    """401 in the API's shape, whatever the path; only health is anybody's business."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=keys["file"]) as running:
        for path in ("/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/sessions", "/x"):
            answer = await running.http.post(path, json={"model": "fake"}, headers=headers)
            assert answer.status_code == 401, path
            assert answer.headers["www-authenticate"] == "Bearer"
            assert ("type" in answer.json()) is (path == "/v1/messages")
        assert (await running.http.get("/metrics", headers=headers)).status_code == 401
        assert (await running.http.get("/health", headers=headers)).status_code == 200
        assert not engine.seen


async def test_either_header_carries_a_key_and_no_engine_sees_it(keys: dict[str, str]) -> None:
    """OpenAI's and Anthropic's clients are served; keys of the router stay with it."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=keys["file"]) as running:
        for headers in ({"Authorization": f"Bearer {keys['red']}"}, {"x-api-key": keys["red"]}):
            assert (await running.chat(headers=headers)).status_code == 200
        both = {"Authorization": f"Bearer {keys['red']}", "x-api-key": keys["blue"]}
        assert (await running.chat(headers=both)).status_code == 401
        for seen in engine.seen:
            assert keys["red"] not in json.dumps(dict(seen.headers))
            assert "authorization" not in seen.headers


async def test_tenants_share_neither_sessions_nor_kv(keys: dict[str, str]) -> None:
    """One session id of two tenants is two sessions with two salts, and is shown to no engine."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=keys["file"]) as running:
        for name in ("red", "blue", "red"):
            answer = await ask(running, keys[name], cache_salt="mine")
            assert answer.status_code == 200
        red, blue, again = engine.seen
        for name in ("tc_session", "tc_tenant"):
            assert red.xargs[name] != blue.xargs[name]
            assert red.xargs[name] == again.xargs[name]
            assert "red" not in red.xargs[name]
        assert red.xargs["tc_session"] != "s"
        assert red.body["cache_salt"] == again.body["cache_salt"] != blue.body["cache_salt"]
        assert "mine" not in red.body["cache_salt"]


@pytest.mark.parametrize(("setting", "shared"), [("tenant", True), ("session", False)])
async def test_a_salt_may_separate_sessions_too(
    keys: dict[str, str], setting: str, shared: bool
) -> None:
    """By default a tenant's sessions share prefixes; with "session" only a tree of them does."""
    async with (
        fake_pair() as ([prefill], [decode]),
        bench(prefill, decode, keys_file=keys["file"], cache_salt=setting) as running,
    ):
        await ask(running, keys["red"], session="a")
        await ask(running, keys["red"], session="b")
        a, b = (seen.body["cache_salt"] for seen in decode.seen[:2])
        assert (a == b) is shared
        assert [one.body["cache_salt"] for one in prefill.seen[:2]] == [a, b]


async def test_a_conversation_is_followed_within_its_tenant(keys: dict[str, str]) -> None:
    """Who sends another tenant's history, answer included, begins a conversation of its own."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=keys["file"]) as running:
        first = await ask(running, keys["red"], session=None)
        said = first.json()["choices"][0]["message"]
        history = [*MESSAGES, said, {"role": "user", "content": "And?"}]
        for name in ("blue", "red"):
            await ask(running, keys[name], session=None, messages=history)
        begun, blue, red = (seen.xargs["tc_session"] for seen in engine.seen)
        assert red == begun != blue


async def test_records_are_their_tenants(keys: dict[str, str]) -> None:
    """A call's record is for its tenant and administrators; for others there is none."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=keys["file"]) as running:
        answer = await ask(running, keys["red"])
        assert outcome_of(answer).prompt > 0
        path = f"/v1/calls/{answer.headers['x-request-id']}"
        status = {}
        for name in ("red", "blue", "admin"):
            headers = {"Authorization": f"Bearer {keys[name]}"}
            status[name] = (await running.http.get(path, headers=headers)).status_code
        assert status == {"red": 200, "blue": 404, "admin": 200}


async def test_sessions_are_listed_for_administrators(keys: dict[str, str]) -> None:
    """By hash and engine; a tenant's key is not enough."""
    engine = FakeEngine()
    async with fake_engines(engine), bench(engine, keys_file=keys["file"]) as running:
        await ask(running, keys["red"], session="my-session")
        headers = {"Authorization": f"Bearer {keys['red']}"}
        assert (await running.http.get("/v1/sessions", headers=headers)).status_code == 403
        headers = {"Authorization": f"Bearer {keys['admin']}"}
        listed = await running.http.get("/v1/sessions", headers=headers)
        assert listed.json()["num_sessions"] == 1
        assert listed.json()["sessions"][0]["served_by"] == "single-0"
        assert "my-session" not in listed.text


@given(st.text(max_size=20), st.text(max_size=20), st.none() | st.text(max_size=9))
def test_no_two_tenants_make_one_salt(given: str, other: str, root: str | None) -> None:
    """Whatever clients send, salts of two tenants differ; without keys the client's stays."""
    red, blue = Caller(tenant="red"), Caller(tenant="blue")
    assert salt_of(red, root, given) != salt_of(blue, root, other)
    assert salt_of(Caller(), root, given) is None


# --- TLS ------------------------------------------------------------------------------------


async def test_calls_can_be_encrypted(tmp_path: Path) -> None:
    """With a certificate the router speaks HTTPS, and nothing else."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    engine = FakeEngine()
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    async with fake_engines(engine), bench(engine, **files) as running:
        assert running.router.url.startswith("https://")
        trust = ssl.create_default_context(cafile=str(certificate))
        async with httpx2.AsyncClient(base_url=running.router.url, verify=trust) as http:
            body = {"model": "fake", "messages": MESSAGES}
            answer = await http.post("/v1/chat/completions", json=body)
            assert answer.status_code == 200
        async with httpx2.AsyncClient() as http:
            with pytest.raises(httpx2.HTTPError):
                await http.get(running.router.url.replace("https", "http") + "/health")


async def test_a_new_certificate_counts_without_a_restart(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """From the next connection on; half of a new pair is reported, and the old one stays."""
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    certificate.write_text(CERTIFICATE)
    key.write_text(PRIVATE_KEY)
    engine, now = FakeEngine(), [1000.0]
    files = {"tls_cert_file": str(certificate), "tls_key_file": str(key)}
    async with (
        fake_engines(engine),
        serving(config_for([engine], **files), clock=lambda: now[0]) as router,
    ):

        async def connects(trusted: str) -> bool:
            now[0] += 2
            trust = ssl.create_default_context(cadata=trusted)
            async with httpx2.AsyncClient(base_url=router.url, verify=trust) as http:
                try:
                    return (await http.get("/health")).status_code == 200
                except httpx2.ConnectError:
                    return False

        assert await connects(CERTIFICATE)
        certificate.write_text(NEXT_CERTIFICATE)
        assert await connects(CERTIFICATE)
        assert "the certificate in use stays" in caplog.text
        key.write_text(NEXT_PRIVATE_KEY)
        assert await connects(NEXT_CERTIFICATE)
        assert not await connects(CERTIFICATE)


async def test_authorities_that_cannot_be_used_are_said(tmp_path: Path) -> None:
    """At start, with the file named."""
    engine = FakeEngine()
    async with fake_engines(engine):
        with pytest.raises(ConfigError, match=r"none\.pem"):
            async with bench(engine, engines_ca_file=str(tmp_path / "none.pem")):
                raise AssertionError("served without authorities")


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"tls_cert_file": "a.pem"}, "belong together"), ({"cache_salt": "none"}, "cache_salt")],
)
def test_half_a_setting_is_refused(settings: dict[str, Any], word: str) -> None:
    """Before anything is served."""
    engines = [{"name": "e", "side": "single", "url": "http://127.0.0.1:1"}]
    with pytest.raises(ConfigError, match=word):
        parse_config({"engines": engines, **settings})


async def test_a_certificate_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    """At start, with both files named."""
    files = {"tls_cert_file": str(tmp_path / "a.pem"), "tls_key_file": str(tmp_path / "b.pem")}
    engine = FakeEngine()
    async with fake_engines(engine):
        with pytest.raises(ConfigError, match=r"a\.pem"):
            async with bench(engine, **files):
                raise AssertionError("served without a certificate")
