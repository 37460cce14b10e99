"""``turncache doctor``: what is wrong with an installation, engines, a server or its requests."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, Final
from urllib.parse import urlsplit

import typer

from turncache.errors import EnvironmentFault, TurncacheError, UsageError
from turncache_server.control.client import ControlClient
from turncache_server.control.keys import FleetKeys
from turncache_server.control.messages import Hello, HelloReply
from turncache_server.exits import CHECK_FAILED
from turncache_server.launch.machine import (
    EngineEnvironment,
    inspect_environment,
    inspect_machine,
)
from turncache_server.versions import Support, name_tested_versions, support_of
from turncache_tools import urls
from turncache_tools.control import TIMEOUT_S, SecretFile, control_addresses, fleet_keys, why_silent
from turncache_tools.doctor_log import look_at_log
from turncache_tools.doctor_router import look_at_router
from turncache_tools.finding import Finding, Verdict
from turncache_tools.router_looks import NO_KEY
from turncache_tools.shell import write_json, write_table

_GIB: Final = 2**30
#: One small call may wait behind a long queue.
_SERVER_TIMEOUT_S: Final = 120.0


def doctor(
    engines: Annotated[
        list[str] | None,
        typer.Argument(metavar="[ENGINE...]", help="Control sockets of running engines."),
    ] = None,
    *,
    router: Annotated[
        str | None, typer.Option(help="Base URL of a running router or engine.")
    ] = None,
    fleet_secret_file: SecretFile = None,
    python: Annotated[
        str | None,
        typer.Option(
            envvar="TURNCACHE_ENGINE_PYTHON",
            help="Interpreter of the engine environment, to look at; this one when nothing is "
            "named.",
        ),
    ] = None,
    base_url: Annotated[
        str | None,
        typer.Option(help="Base URL of an OpenAI-compatible server: asked with a few small calls."),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="Model for --base-url; else the first that it lists.")
    ] = None,
    api_key: Annotated[
        str,
        typer.Option(
            envvar="OPENAI_API_KEY", help="Key for --base-url and --router.", show_default=False
        ),
    ] = NO_KEY,
    log: Annotated[
        str | None,
        typer.Option(help="Logged requests, one JSON object per line; - for standard input."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Findings as JSON.")] = False,
) -> None:
    """Look at the installation, or at what is named; exit 1 on a failure."""
    findings: list[Finding] = []
    keys: FleetKeys | None = None
    if (python is not None and (engines or router)) or not (engines or router or base_url or log):
        findings += look_at_installation(python)
    if base_url is not None:
        findings += _look_at_base_url(base_url, model, api_key)
    if log is not None:
        findings += _look_at_file(log)
    if fleet_secret_file is not None:
        secret, keys = look_at_secret(fleet_secret_file)
        findings.append(secret)
    if engines and (keys is not None or fleet_secret_file is None):
        findings += look_at_engines(control_addresses(engines, keyed=keys is not None), keys=keys)
    if router is not None:
        findings += look_at_router(urls.base_url(router, "--router"), api_key=api_key)
    if as_json:
        write_json([asdict(finding) for finding in findings])
    else:
        write_table(
            ("what", "verdict", "detail"), [(f.subject, f.verdict, f.detail) for f in findings]
        )
    if any(finding.verdict == "failed" for finding in findings):
        raise typer.Exit(CHECK_FAILED)


def _look_at_base_url(text: str, model: str | None, api_key: str) -> list[Finding]:
    # Only this question needs the openai package: the others must not pay for it.
    from turncache.client import OpenAI  # noqa: PLC0415
    from turncache_tools.doctor_server import look_at_server  # noqa: PLC0415

    url = urls.http_url(text, "--base-url")
    if not urlsplit(url).path:
        # Where every OpenAI-compatible server has its API.
        url += "/v1"
    with OpenAI(base_url=url, api_key=api_key, max_retries=0, timeout=_SERVER_TIMEOUT_S) as client:
        host = client.base_url.host
        told = client.with_profile("auto", hosts=[f"[{host}]" if ":" in host else host])
        return look_at_server(told, model)


def _look_at_file(name: str) -> list[Finding]:
    # What is no text is counted as lines without a request, as what is no JSON is.
    if name == "-":
        return look_at_log(TextIOWrapper(sys.stdin.buffer, encoding="utf-8", errors="replace"))
    try:
        with Path(name).open(encoding="utf-8", errors="replace") as lines:
            return look_at_log(lines)
    except OSError as error:
        raise UsageError(f"--log {name!r}: {error.strerror}") from error


def look_at_installation(python: str | None) -> list[Finding]:
    """Look at the engine environment and this machine."""
    try:
        environment = inspect_environment(python)
    except EnvironmentFault as error:
        return [Finding(subject="engine environment", verdict="failed", detail=str(error))]
    machine = inspect_machine()
    device = f"{len(machine.gpus)} GPUs" if environment.cuda else "CPU"
    return [
        _vllm(environment),
        _installed("turncache", environment.turncache, environment, "engines load it"),
        _installed("nixl", environment.nixl, environment, "prefill and decode need it"),
        Finding(
            subject="machine",
            verdict="note" if environment.cuda and not machine.gpus else "ok",
            detail=f"{device}, {len(machine.cores)} cores, "
            f"{machine.memory_available_bytes / _GIB:.1f} GiB available",
        ),
    ]


def _vllm(environment: EngineEnvironment) -> Finding:
    version = environment.vllm_version
    if version is None:
        return Finding(
            subject="vllm",
            verdict="failed",
            detail=f"not installed for {environment.python}; name another with --python",
        )
    verdicts: dict[Support, Verdict] = {
        Support.TESTED: "ok",
        Support.UNTESTED: "note",
        Support.TOO_OLD: "failed",
    }
    support = support_of(version)
    built_for = "GPU" if environment.cuda else "CPU"
    hint = {
        Support.TESTED: "tested",
        Support.UNTESTED: f"untested: starts in mode observe (tested: {name_tested_versions()})",
        Support.TOO_OLD: f"too old (tested: {name_tested_versions()})",
    }[support]
    return Finding(
        subject="vllm", verdict=verdicts[support], detail=f"{version} for {built_for}, {hint}"
    )


def _installed(name: str, present: bool, where: EngineEnvironment, purpose: str) -> Finding:
    if present:
        return Finding(subject=name, verdict="ok", detail=f"installed for {where.python}")
    return Finding(
        subject=name,
        verdict="failed" if name == "turncache" else "note",
        detail=f"not installed for {where.python}; {purpose}",
    )


def look_at_secret(path: Path) -> tuple[Finding, FleetKeys | None]:
    """Read the fleet's secret; its digest is equal on every machine that has the same."""
    try:
        keys = fleet_keys(path)
    except TurncacheError as error:
        return Finding(subject="fleet secret", verdict="failed", detail=str(error)), None
    assert keys is not None, "a file was named"
    return Finding(subject="fleet secret", verdict="ok", detail=f"digest {keys.digest}"), keys


def look_at_engines(
    addresses: Sequence[str],
    ask: Callable[[str], HelloReply] | None = None,
    *,
    keys: FleetKeys | None = None,
) -> list[Finding]:
    """Say hello to every engine, and compare what has to be equal for KV to be exchanged."""
    if ask is None:
        with closing(ControlClient(keys)) as client:
            return look_at_engines(
                addresses,
                lambda address: client.ask(address, Hello(), HelloReply, timeout_s=TIMEOUT_S),
            )
    findings: list[Finding] = []
    replies: dict[str, HelloReply] = {}
    for address in addresses:
        try:
            reply = replies[address] = ask(address)
        except TurncacheError as error:
            why = why_silent(address, error)
            findings.append(Finding(subject=address, verdict="failed", detail=why))
            continue
        name = f"{reply.name}, " if reply.name else ""
        text = f"{name}{reply.side}, mode {reply.mode}, vLLM {reply.vllm_version}"
        missing = "; ".join(reply.missing)
        findings.append(
            Finding(
                subject=address,
                verdict="note" if missing or reply.mode != "on" else "ok",
                detail=f"{text}; {missing}" if missing else text,
            )
        )
    return findings + _compare(replies)


def _compare(replies: dict[str, HelloReply]) -> list[Finding]:
    if len(replies) < 2:
        return []
    (first, reference), *others = replies.items()
    differences = [
        f"{key}: {first} has {reference.fingerprint.get(key)!r}, "
        f"{address} has {reply.fingerprint.get(key)!r}"
        for address, reply in others
        for key in sorted({*reference.fingerprint, *reply.fingerprint})
        if reference.fingerprint.get(key) != reply.fingerprint.get(key)
    ]
    if differences:
        return [Finding(subject="same KV", verdict="failed", detail="; ".join(differences))]
    return [Finding(subject="same KV", verdict="ok", detail="engines can exchange KV")]
