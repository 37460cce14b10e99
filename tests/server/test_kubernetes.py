"""The Kubernetes manifests agree with each other, with our settings, and on who reaches whom."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import kubernetes_validate
import pytest
import yaml
from typer.testing import CliRunner

from tests.server.test_docs import SERVER
from turncache_server.connector.config import parse_settings
from turncache_server.router.config import RouterConfig, load_config
from turncache_server.router.engines_kubernetes import Slices
from turncache_server.router.plan import Side
from turncache_tools.cli import app

FOLDER = SERVER / "kubernetes"
PAGE = (FOLDER / "README.md").read_text(encoding="utf-8")
OBJECTS: list[dict[str, Any]] = [
    each
    for path in sorted(FOLDER.glob("*.yaml"))
    for each in yaml.safe_load_all(path.read_text(encoding="utf-8"))
]
WORKLOADS = [each for each in OBJECTS if each["kind"] in ("Deployment", "StatefulSet")]
ENGINES = [each for each in WORKLOADS if each["kind"] == "StatefulSet"]
(ROUTER,) = (each for each in WORKLOADS if each["kind"] == "Deployment")
#: Secrets are in no manifest: the page says how they are made.
SECRETS = dict(
    re.findall(r"^\$ kubectl create secret generic (\S+) --from-file=(\S+)$", PAGE, re.MULTILINE)
)
by_name = pytest.mark.parametrize("workload", WORKLOADS, ids=lambda each: each["metadata"]["name"])
by_side = pytest.mark.parametrize("engines", ENGINES, ids=lambda each: each["metadata"]["name"])


def named(kind: str) -> dict[str, dict[str, Any]]:
    """Return the objects of a kind by name."""
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] == kind}


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the specification of a workload's pods."""
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def labels(workload: dict[str, Any]) -> dict[str, str]:
    """Return the labels of a workload's pods."""
    found: dict[str, str] = workload["spec"]["template"]["metadata"]["labels"]
    return found


def ports(workload: dict[str, Any]) -> dict[str, int]:
    """Return the ports of a workload's pods by name."""
    return {each["name"]: each["containerPort"] for each in container(workload)["ports"]}


def container(workload: dict[str, Any]) -> dict[str, Any]:
    """Return the one container that serves."""
    (only,) = pod(workload)["containers"]
    assert isinstance(only, dict)
    return only


def selects(selector: dict[str, Any], found: dict[str, str]) -> bool:
    """Say whether a selector takes a pod."""
    assert set(selector) <= {"matchLabels"}
    return selector.get("matchLabels", {}).items() <= found.items()


def settings_of(engines: dict[str, Any], pod_name: str) -> dict[str, Any]:
    """Return an engine's ``--kv-transfer-config``, as its pod gets it."""
    (text,) = (a for a in container(engines)["args"] if a.startswith("--kv-transfer-config="))
    text = text.partition("=")[2].replace("$(POD_NAME)", pod_name).replace("$(POD_IP)", "10.0.0.9")
    read: dict[str, Any] = json.loads(text)
    return read


def pods_of(engines: dict[str, Any]) -> list[str]:
    """Name the pods of a StatefulSet."""
    return [f"{engines['metadata']['name']}-{n}" for n in range(engines["spec"]["replicas"])]


def address_of(pod_name: str) -> str:
    """Return the control address that routers and peers ask."""
    (engines,) = (each for each in ENGINES if pod_name in pods_of(each))
    return f"tcp://{pod_name}.{engines['spec']['serviceName']}:{ports(engines)['control']}"


@pytest.fixture
def router(tmp_path: Path) -> RouterConfig:
    """What a router reads from the ConfigMap, mounted elsewhere."""
    mounts = {each["name"]: each["mountPath"] for each in container(ROUTER)["volumeMounts"]}
    for name, text in named("ConfigMap")["turncache-router"]["data"].items():
        moved = text.replace(mounts["config"] + "/", f"{tmp_path}/")
        (tmp_path / name).write_text(moved, encoding="utf-8")
    command = container(ROUTER)["command"]
    assert command[:3] == ["turncache", "router", "--config"]
    return load_config(Path(command[3].replace(mounts["config"], str(tmp_path))))


# --- each other -----------------------------------------------------------------------------


def test_every_object_has_a_name_of_its_own() -> None:
    """And the labels by which all of it is found; no secret is among them."""
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS]
    assert len(set(names)) == len(names)
    assert all(
        each["metadata"]["labels"]["app.kubernetes.io/name"] == "turncache" for each in OBJECTS
    )
    assert all(each["apiVersion"] for each in OBJECTS)
    assert not named("Secret")


@by_name
def test_selectors_take_their_own_pods_and_no_others(workload: dict[str, Any]) -> None:
    """Of the workload, its service and its disruption budget."""
    selectors = [
        workload["spec"]["selector"],
        *(
            budget["spec"]["selector"]
            for budget in named("PodDisruptionBudget").values()
            if budget["metadata"]["labels"] == workload["metadata"]["labels"]
        ),
        *(
            {"matchLabels": service["spec"]["selector"]}
            for service in named("Service").values()
            if selects(
                {"matchLabels": workload["metadata"]["labels"]}, service["metadata"]["labels"]
            )
        ),
    ]
    assert len(selectors) == 3
    for selector in selectors:
        assert [each for each in WORKLOADS if selects(selector, labels(each))] == [workload]


@by_name
def test_services_and_probes_ask_for_ports_that_there_are(workload: dict[str, Any]) -> None:
    """By name, and the service's number is the pod's."""
    (service,) = (
        each
        for each in named("Service").values()
        if selects({"matchLabels": workload["metadata"]["labels"]}, each["metadata"]["labels"])
    )
    assert {p["targetPort"]: p["port"] for p in service["spec"]["ports"]} == ports(workload)
    probes = [v for name, v in container(workload).items() if name.endswith("Probe")]
    assert len(probes) >= 2
    for probe in probes:
        asked = probe.get("httpGet") or probe["tcpSocket"]
        assert asked["port"] == "http"
        assert asked.get("path", "/health") == "/health"
    assert container(workload)["readinessProbe"]["httpGet"]["path"] == "/health"


@by_name
def test_what_is_mounted_exists(workload: dict[str, Any]) -> None:
    """Volumes, ConfigMaps, secrets, and the files that commands name."""
    spec = pod(workload)
    volumes = {each["name"]: each for each in spec["volumes"]}
    mounted = [
        mount
        for each in (*spec["initContainers"], *spec["containers"])
        for mount in each["volumeMounts"]
    ]
    assert {mount["name"] for mount in mounted} == set(volumes)
    assert not any("subPath" in mount for mount in mounted)
    for volume in volumes.values():
        if "configMap" in volume:
            assert volume["configMap"]["name"] in named("ConfigMap")
        if "secret" in volume:
            assert volume["secret"]["secretName"] in SECRETS
    (init,) = spec["initContainers"]
    source, target = init["command"][-2:]
    assert source == f"/secret/{SECRETS['turncache-fleet']}"
    assert target == "/run/turncache/fleet-secret"
    assert init["command"][2] == "0400"
    assert init["image"] == container(workload)["image"]


@by_name
def test_pods_have_no_rights_that_they_do_not_need(workload: dict[str, Any]) -> None:
    """An ordinary user, no token, no capability."""
    spec = pod(workload)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] >= 1000
    assert spec["automountServiceAccountToken"] is False
    for each in (*spec["initContainers"], *spec["containers"]):
        assert each["securityContext"]["allowPrivilegeEscalation"] is False
        assert each["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.fixture(scope="module")
def schemas() -> Iterator[None]:
    """Read the published schemas once: there are 2 MB of them, for every object."""
    with pytest.MonkeyPatch.context() as patch:
        read = functools.cache(kubernetes_validate.utils.schema_contents)
        patch.setattr(kubernetes_validate.utils, "schema_contents", read)
        yield


#: The oldest that may still be in use, and the newest that there are schemas of.
@pytest.mark.parametrize("version", ["1.28", kubernetes_validate.latest_version()])
def test_manifests_are_what_kubernetes_publishes(schemas: None, version: str) -> None:
    """By the schemas of its API, which know every field: a misspelt one is refused."""
    for each in OBJECTS:
        kubernetes_validate.validate(each, version, strict=True)
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**OBJECTS[0], "sepc": {}}, version, strict=True)


# --- our settings ---------------------------------------------------------------------------


def test_the_routers_settings_are_read(router: RouterConfig) -> None:
    """They load, and name files where they are mounted and the port where it is asked."""
    assert router.port == ports(ROUTER)["http"]
    assert router.host == "0.0.0.0"
    assert router.engines_file
    mounts = {each["name"]: each["mountPath"] for each in container(ROUTER)["volumeMounts"]}
    assert router.fleet_secret_file == f"{mounts['run']}/{SECRETS['turncache-fleet']}"
    assert router.keys_file == f"{mounts['keys']}/{SECRETS['turncache-keys']}"


def test_the_list_of_engines_is_the_pods(router: RouterConfig) -> None:
    """Each at its own name, on the ports of its side, and of the side that it is."""
    listed = {engine.name: engine for engine in router.engines}
    assert list(listed) == [
        name
        for side in Side
        for each in ENGINES
        for name in pods_of(each)
        if each["metadata"]["name"] == side.value
    ]
    for engines in ENGINES:
        for name in pods_of(engines):
            engine, service = listed[name], engines["spec"]["serviceName"]
            assert engine.url == f"http://{name}.{service}:{ports(engines)['http']}"
            assert engine.control == address_of(name)
            assert engine.engine_id == name
            extra = settings_of(engines, name)["kv_connector_extra_config"]
            assert extra["turncache"]["side"] == engine.side.value


@by_side
def test_engines_read_their_settings_and_peers(engines: dict[str, Any]) -> None:
    """The extension takes them; who may be pulled from is the whole other side."""
    (other,) = (each for each in ENGINES if each is not engines)
    for name in pods_of(engines):
        transfer = settings_of(engines, name)
        settings = parse_settings(transfer["kv_connector_extra_config"])
        assert settings.name == name
        assert settings.control_address == f"tcp://10.0.0.9:{ports(engines)['control']}"
        assert dict(settings.peers) == {peer: address_of(peer) for peer in pods_of(other)}
        assert settings.fleet_secret_file == "/run/turncache/fleet-secret"
    variables = {each["name"]: each.get("value") for each in container(engines)["env"]}
    assert variables["VLLM_NIXL_SIDE_CHANNEL_PORT"] == str(ports(engines)["nixl"])
    assert f"--port={ports(engines)['http']}" in container(engines)["args"]


@by_side
def test_peers_find_pods_that_start_or_drain(engines: dict[str, Any]) -> None:
    """A headless service gives each its name, ready or not."""
    service = named("Service")[engines["spec"]["serviceName"]]["spec"]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"] is True


def test_the_services_name_the_same_engines_as_the_list(router: RouterConfig) -> None:
    """Followed through Kubernetes a fleet is the one of the file, by other addresses."""
    slices = Slices()
    slices.replace(
        [
            {
                "metadata": service["metadata"],
                "ports": [
                    {"name": name, "port": number} for name, number in ports(engines).items()
                ],
                "endpoints": [
                    {"addresses": [f"10.0.{at}.{n}"], "targetRef": {"name": name}}
                    for n, name in enumerate(pods_of(engines))
                ],
            }
            for at, engines in enumerate(ENGINES)
            for service in [named("Service")[engines["spec"]["serviceName"]]]
        ]
    )
    found = {engine.name: engine for engine in slices.engines(keyed=True)}
    listed = {engine.name: engine for engine in router.engines}
    assert found.keys() == listed.keys()
    for name, engine in found.items():
        assert (engine.side, engine.engine_id) == (listed[name].side, listed[name].engine_id)
        for one, other in ((engine.url, listed[name].url), (engine.control, listed[name].control)):
            assert urlsplit(one or "").port == urlsplit(other or "").port


def test_a_router_may_read_endpoint_slices_and_nothing_else() -> None:
    """With the account that its pods run as; its token is mounted where that is wanted."""
    (account,) = named("ServiceAccount")
    assert pod(ROUTER)["serviceAccountName"] == account
    (role,) = named("Role").values()
    (binding,) = named("RoleBinding").values()
    assert binding["subjects"] == [{"kind": "ServiceAccount", "name": account}]
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    (rule,) = role["rules"]
    assert rule == {
        "apiGroups": ["discovery.k8s.io"],
        "resources": ["endpointslices"],
        "verbs": ["get", "list", "watch"],
    }
    for setting in re.findall(r"^(kubernetes_\w+) = ", PAGE, re.MULTILINE):
        assert setting in RouterConfig.__dataclass_fields__


# --- the end of a pod -----------------------------------------------------------------------


@by_side
def test_an_engine_hands_its_sessions_over_before_term(engines: dict[str, Any]) -> None:
    """With a command that exists, within the time that the pod has."""
    shell, option, text = container(engines)["lifecycle"]["preStop"]["exec"]["command"]
    assert (shell, option) == ("sh", "-c")
    matched = re.fullmatch(
        r'exec turncache drain "tcp://\$POD_IP:(\d+)" --fleet-secret-file (\S+) --timeout (\d+)',
        text,
    )
    assert matched is not None
    assert int(matched[1]) == ports(engines)["control"]
    assert matched[2] == "/run/turncache/fleet-secret"
    assert int(matched[3]) + 30 <= pod(engines)["terminationGracePeriodSeconds"]
    shown = CliRunner().invoke(app, ["drain", "--help"], env={"COLUMNS": "200"})
    plain = re.sub(r"\x1b\[[0-9;]*m", "", shown.output)
    assert all(flag in plain for flag in ("--fleet-secret-file", "--timeout"))


def test_a_router_has_time_to_finish_its_calls(router: RouterConfig) -> None:
    """The pause before TERM, then ``shutdown_s``."""
    command, pause_s = container(ROUTER)["lifecycle"]["preStop"]["exec"]["command"]
    assert command == "sleep"
    assert int(pause_s) + router.shutdown_s < pod(ROUTER)["terminationGracePeriodSeconds"]
    assert "httpGet" not in container(ROUTER)["livenessProbe"]


# --- who reaches whom -----------------------------------------------------------------------


def reached(source: dict[str, str], target: dict[str, Any]) -> set[str]:
    """Work out what a pod with some labels reaches of another, by port name or range."""
    policies = [
        policy["spec"]
        for policy in named("NetworkPolicy").values()
        if selects(policy["spec"]["podSelector"], labels(target))
        and "Ingress" in policy["spec"]["policyTypes"]
    ]
    assert policies, "a pod that no policy selects is open to all"
    return {text for policy in policies for text in _let_in(policy, source, ports(target))}


def _let_in(policy: dict[str, Any], source: dict[str, str], known: dict[str, int]) -> Iterator[str]:
    for rule in policy["ingress"]:
        # Without "from" everybody; without "ports" everything, which nothing here may say.
        peers = rule.get("from", [{"podSelector": {}}])
        if any(selects(peer["podSelector"], source) for peer in peers):
            for port in rule["ports"]:
                assert port["protocol"] == "TCP"
                if isinstance(port["port"], str):
                    assert port["port"] in known
                    yield port["port"]
                else:
                    yield f"{port['port']}-{port['endPort']}"


@by_side
def test_only_routers_and_engines_reach_engines(engines: dict[str, Any]) -> None:
    """HTTP is the routers', NIXL and UCX are the engines', control is both's."""
    (data,) = (
        each["value"] for each in container(engines)["env"] if each["name"] == "UCX_TCP_PORT_RANGE"
    )
    assert reached(labels(ROUTER), engines) == {"http", "control"}
    for other in ENGINES:
        assert reached(labels(other), engines) == {"control", "nixl", data}
    for stranger in ({}, {"app.kubernetes.io/name": "turncache"}, {"app": "shell"}):
        assert reached(stranger, engines) == set()


def test_everybody_reaches_the_routers_one_port() -> None:
    """Where a key is asked for."""
    assert reached({}, ROUTER) == {"http"}
    assert set(ports(ROUTER)) == {"http"}


def test_the_page_names_every_manifest_and_commands_that_exist() -> None:
    """And the ports that are in the manifests."""
    for path in FOLDER.glob("*.yaml"):
        assert f"]({path.name})" in PAGE
    for engines in ENGINES:
        for number in ports(engines).values():
            assert str(number) in PAGE
    for verb, rest in re.findall(r"turncache (router|drain|flags)((?: --?[a-z-]+)*)", PAGE):
        shown = CliRunner().invoke(app, [verb, "--help"], env={"COLUMNS": "200"})
        assert shown.exit_code == 0
        assert all(flag in shown.output for flag in rest.split())
