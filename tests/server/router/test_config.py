"""Settings are checked once, and an error names the setting, its value and the way out."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from turncache.errors import ConfigError, ProtocolError
from turncache_server.router import config as module
from turncache_server.router.__main__ import main
from turncache_server.router.config import RouterConfig, load_config, parse_config
from turncache_server.router.flags import FLAGS, overrides
from turncache_server.router.plan import Side

ONE = {"name": "single-0", "side": "single", "url": "http://127.0.0.1:8100"}
PREFILL = {"name": "p", "side": "prefill", "url": "http://127.0.0.1:8101"}
DECODE = {"name": "d", "side": "decode", "url": "http://127.0.0.1:8201/"}


def test_a_file_with_flags_on_top(tmp_path: Path) -> None:
    """Flags win over the file, the file over the defaults."""
    path = tmp_path / "router.toml"
    path.write_text(
        "port = 9000\nping_s = 60\nreturn_enabled = false\n"
        '[[engines]]\nname = "p"\nside = "prefill"\nurl = "http://127.0.0.1:8101"\n'
        'engine_id = "prefill-0"\ncontrol = "tcp://127.0.0.1:5801"\n'
        '[[engines]]\nname = "d"\nside = "decode"\nurl = "http://127.0.0.1:8201/"\n'
    )
    config = load_config(path, {"port": 9001})
    assert (config.port, config.ping_s, config.return_enabled) == (9001, 60.0, False)
    assert config.engines[0].engine_id == "prefill-0"
    assert config.engines[0].control == "tcp://127.0.0.1:5801"
    assert (config.engines[1].engine_id, config.engines[1].side) == ("d", Side.DECODE)
    assert config.engines[1].url == "http://127.0.0.1:8201"


def test_every_setting_is_a_flag_of_the_same_name() -> None:
    """None is missing, and none has a flag whose value the settings would not take."""
    fields = {item.name: item for item in dataclasses.fields(RouterConfig)}
    assert {flag.setting for flag in FLAGS} == fields.keys() - {"engines"}
    for flag in FLAGS:
        assert flag.option == "--" + flag.setting.replace("_", "-")
        default = fields[flag.setting].default
        assert flag.kind is type(default)
        assert parse_config({"engines": [ONE], flag.setting: default})


@pytest.mark.parametrize(
    "listed",
    [
        'engines_file = "engines.toml"\n',
        'kubernetes_selector = "app=turncache"\n',
        '[[engines]]\nname = "x"\nside = "single"\nurl = "http://127.0.0.1:1"\n',
    ],
)
def test_engines_of_flags_replace_those_of_the_file(tmp_path: Path, listed: str) -> None:
    """However the file names its own, and however the flags name theirs."""
    path, others = tmp_path / "router.toml", tmp_path / "others.toml"
    path.write_text(f"port = 9000\n{listed}")
    others.write_text('[[engines]]\nname = "y"\nside = "single"\nurl = "http://127.0.0.1:2"\n')
    flags = overrides({"ping_s": None}, ["name=z,side=single,url=http://127.0.0.1:3"])
    config = load_config(path, flags)
    assert ([engine.name for engine in config.engines], config.port) == (["z"], 9000)
    assert (config.engines_file, config.kubernetes_selector) == ("", "")
    config = load_config(path, {"engines_file": str(others)})
    assert [engine.name for engine in config.engines] == ["y"]


@pytest.mark.parametrize(
    ("settings", "setting", "words"),
    [
        ({"prot": 1}, "prot", "expected one of .*port"),
        ({"port": "8000"}, "port", "'8000'.*whole number"),
        ({"port": True}, "port", "whole number"),
        ({"port": 70000}, "port", "70000.*from 0 to 65535"),
        ({"admin": 1}, "admin", "true or false"),
        ({"on_disconnect": "keep"}, "on_disconnect", "'keep'.*cancel, drain"),
        ({"ping_s": 4000}, "ping_s", "from 0 to 3600"),
        ({"idle_timeout_s": "x"}, "idle_timeout_s", "a number"),
        ({"max_attempts": 0}, "max_attempts", "from 1"),
        ({"host": 1}, "host", "text"),
        ({"more_paths": "/v1/rerank v1/score"}, "more_paths", "'v1/score'"),
        ({"more_paths": "/v1/{x}"}, "more_paths", "parted by spaces"),
        ({"more_paths": "/v1/../collective_rpc"}, "more_paths", "expected paths"),
        ({"engines": [{**ONE, "url": "http://h :1"}]}, "engines[0].url", "http://host:port"),
        (
            {"engines": [ONE, {**ONE, "name": "b", "url": "HTTP://127.0.0.1:8100/"}]},
            "engines.url",
            "twice",
        ),
        ({"session_header": "X Thread"}, "session_header", "'X Thread'.*name of a header"),
        ({"engines": []}, "engines", "at least one"),
        ({"engines": "x"}, "engines", "at least one"),
        ({"engines": ["x"]}, "engines[0]", "table"),
        ({"engines": [{**ONE, "color": "red"}]}, "engines[0].color", "expected one of"),
        ({"engines": [{"name": "a", "side": "single"}]}, "engines[0].url", "missing"),
        ({"engines": [{**ONE, "side": "both"}]}, "engines[0].side", "'both'.*prefill"),
        ({"engines": [{**ONE, "name": "a b"}]}, "engines[0].name", "'a b'"),
        ({"engines": [{**ONE, "url": 5}]}, "engines[0].url", "text"),
        ({"engines": [{**ONE, "url": "ftp://x"}]}, "engines[0].url", "http://host:port"),
        ({"engines": [{**ONE, "url": "http://h:99999"}]}, "engines[0].url", "http://"),
        ({"engines": [{**ONE, "url": "http://a/v1"}]}, "engines[0].url", "without path"),
        ({"engines": [{**ONE, "url": "http://u:p@h"}]}, "engines[0].url", "credentials"),
        ({"engines": [{**ONE, "control": "tcp://10.0.0.1:1"}]}, "engines[0].control", "loop"),
        ({"engines": [PREFILL]}, "engines.side", "at least one prefill and one decode"),
        ({"engines": [ONE, PREFILL, DECODE]}, "engines.side", "decode, prefill, single"),
        ({"engines": [ONE, {**ONE, "name": "b"}]}, "engines.url", "twice"),
        ({"engines": [ONE, {**ONE, "url": "http://b"}]}, "engines.name", "twice"),
    ],
)
def test_an_impossible_setting_is_refused(
    settings: dict[str, Any], setting: str, words: str
) -> None:
    """Unknown names, wrong types and values out of range each say what is legal."""
    with pytest.raises(ConfigError) as caught:
        parse_config({"engines": [ONE], **settings})
    assert caught.value.setting == setting
    assert re.search(words, str(caught.value))


def test_an_illegal_engine_id_is_refused() -> None:
    """An engine id travels in hints: visible ASCII only."""
    with pytest.raises(ProtocolError, match=r"engines\[0\].engine_id"):
        parse_config({"engines": [{**ONE, "engine_id": "a b"}]})


def test_an_unreadable_file_is_a_config_error(tmp_path: Path) -> None:
    """Neither a missing file nor broken TOML ends in a traceback."""
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(tmp_path / "missing.toml")
    broken = tmp_path / "broken.toml"
    broken.write_text("port = ")
    with pytest.raises(ConfigError, match="cannot read"):
        load_config(broken)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--engine", "nonsense"],
        ["--engine", "name=a,side=single,url=http://127.0.0.1:1", "--port", "99999"],
        ["--config", "/does/not/exist.toml"],
        ["--engine", "name=a,side=single,url=http://127.0.0.1:1", "--on-disconnect", "keep"],
    ],
)
def test_the_command_says_what_is_wrong_and_exits_with_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """A usage error is one line on stderr."""
    assert main(arguments) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1


def test_the_readme_lists_every_setting_with_its_default() -> None:
    """The page and the code cannot drift apart."""
    page = (Path(module.__file__).parent / "README.md").read_text(encoding="utf-8")
    for item in dataclasses.fields(RouterConfig):
        if item.name == "engines":
            continue
        row = re.search(rf"^\| `{item.name}` \| ([^|]*) \|", page, re.MULTILINE)
        assert row is not None, item.name
        shown = item.default
        text = f'"{shown}"' if isinstance(shown, str) else f"{shown}".lower()
        assert row.group(1).replace("_", "").strip().startswith(text.removesuffix(".0")), item.name


def test_the_readme_lists_every_code_of_an_error() -> None:
    """Clients act by them: what the code can say is on the page, and nothing else."""
    folder = Path(module.__file__).parent
    source = "".join(path.read_text(encoding="utf-8") for path in folder.rglob("*.py"))
    codes = set(re.findall(r'code="([a-z_]+)"', source))
    # Of legs that have failed: the kinds are a closed list in errors.py.
    words = re.search(r"kind: (``refused``.*?); a closed list", source, re.DOTALL)
    assert words is not None
    codes |= {f"engine_{kind}" for kind in re.findall(r"``(\w+)``", words.group(1))}
    page = (folder / "README.md").read_text(encoding="utf-8")
    table = page[page.index("## Errors of its own") : page.index("## Whose call it is")]
    listed = re.findall(
        r"`([a-z]+(?:_[a-z]+)*)`", "".join(re.findall(r"^\| [^|]*", table, re.MULTILINE))
    )
    assert set(listed) == codes | {"not_found"}


@pytest.mark.parametrize(
    ("host", "url", "itself"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000", True),
        ("127.0.0.1", "http://localhost:8000/", True),
        ("0.0.0.0", "http://127.0.0.1:8000", True),
        ("10.0.0.5", "http://10.0.0.5:8000", True),
        ("router.example", "http://router.example:8000", True),
        ("::1", "http://[::1]:8000", True),
        ("10.0.0.5", "http://127.0.0.1:8000", False),
        ("127.0.0.1", "http://10.0.0.5:8000", False),
        ("127.0.0.1", "http://127.0.0.1:8001", False),
    ],
)
def test_a_router_is_no_engine_of_its_own(host: str, url: str, itself: bool) -> None:
    """A call would come back to it until nothing is left."""
    settings = {"engines": [{**ONE, "url": url}], "host": host, "serve_without_keys": True}
    if not itself:
        assert parse_config(settings)
        return
    with pytest.raises(ConfigError, match="round in circles"):
        parse_config(settings)


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "router.example"])
def test_beyond_loopback_without_keys_is_refused(host: str) -> None:
    """The error names the ways out; both let it start."""
    engines = [{"name": "e", "side": "single", "url": "http://127.0.0.1:1"}]
    with pytest.raises(ConfigError, match=r"keys_file.*127\.0\.0\.1.*serve_without_keys"):
        parse_config({"engines": engines, "host": host})
    assert not parse_config({"engines": engines, "host": host, "serve_without_keys": True}).private
    assert parse_config({"engines": engines, "host": host, "keys_file": "keys.toml"}).keys_file
    for private in ("127.0.0.2", "::1", "localhost"):
        assert parse_config({"engines": engines, "host": private}).private
