"""What a schema cannot know: whether the objects of a rendering fit each other, the server, and a safe rollout.

A rule is a function that yields (object, complaint). Here are those about names and references, in lint_operation.py
those about running it; mutants.py has for every rule a change that it must complain about.
"""

import dataclasses
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import yaml

from manifests import CLUSTER_SCOPED, Manifests, Object, Workload, at, environment, flags, selects

# What the world may reach.
PUBLIC = {"/v1", "/generate", "/health"}

ENUMS = {
    "imagePullPolicy": {"Always", "IfNotPresent", "Never"},
    "whenUnsatisfiable": {"DoNotSchedule", "ScheduleAnyway"},
    "restartPolicy": {"Always", "OnFailure", "Never"},
    "unhealthyPodEvictionPolicy": {"AlwaysAllow", "IfHealthyBudget"},
    "fsGroupChangePolicy": {"Always", "OnRootMismatch"},
    "effect": {"NoSchedule", "PreferNoSchedule", "NoExecute"},
    "operator": {"Exists", "Equal", "In", "NotIn", "DoesNotExist"},
    "pathType": {"Exact", "Prefix"},
    "protocol": {"TCP", "UDP", "HTTP", "HTTPS"},
    "medium": {"Memory"},
}
ENUM_LISTS = {
    "policyTypes": {"Ingress", "Egress"},
    "accessModes": {"ReadWriteOnce", "ReadWriteMany", "ReadOnlyMany", "ReadWriteOncePod"},
}
NAME = re.compile(r"[a-z0-9]([-a-z0-9.]{0,251}[a-z0-9])?")
LABEL = re.compile(r"([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?")

# What the server reads besides its flags and OpenTelemetry's variables.
FURTHER_VARIABLES = {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE", "HF_HOME", "HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "HF_HUB_OFFLINE", "HF_ENDPOINT", "PYTHONHASHSEED"}
FURTHER_VARIABLES |= {"HTTPS_PROXY", "HTTP_PROXY", "NO_PROXY"}

Complaint = tuple[Object, str]


@dataclasses.dataclass(frozen=True)
class World:
    """What a rendering must fit."""

    # Of the running server, and of `octavo serve --help`.
    routes: frozenset[str]
    metrics: frozenset[str]
    help: str
    # Keys of the secrets and ConfigMaps that the operator creates, by kind and name.
    given: dict[tuple[str, str], set[str]]
    # Names that prometheus-adapter gives to metrics of the server.
    adapter: dict[str, str]


Rule = Callable[[Manifests, World], Iterable[Complaint]]
RULES: dict[str, Rule] = {}


def rule(function: Rule) -> Rule:
    RULES[function.__name__.replace("_", "-")] = function
    return function


def lint(manifests: Manifests, world: World, waived: Iterable[str] = ()) -> list[str]:
    """Every complaint as `rule: Kind/name: text`."""
    return [
        f"{name}: {about['kind']}/{at(about, 'metadata', 'name')}: {text}"
        for name, check in RULES.items()
        if name not in set(waived)
        for about, text in check(manifests, world)
    ]


# ---- objects


@rule
def unique(m: Manifests, _: World) -> Iterator[Complaint]:
    seen = set()
    for it in m.objects:
        key = (it["kind"], it["metadata"]["name"])
        if key in seen:
            yield it, "is there twice"
        seen.add(key)


@rule
def names(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.objects:
        if not NAME.fullmatch(it["metadata"]["name"]):
            yield it, "is no name of an object"
        for labels in (at(it, "metadata", "labels"), at(it, "spec", "template", "metadata", "labels")):
            for key, value in (labels or {}).items():
                if not isinstance(value, str) or not LABEL.fullmatch(value):
                    yield it, f"the label {key} cannot be {value!r}"


@rule
def one_namespace(m: Manifests, _: World) -> Iterator[Complaint]:
    spaces = {at(it, "metadata", "namespace") for it in m.objects if it["kind"] not in CLUSTER_SCOPED}
    own = {it["metadata"]["name"] for it in m.of("Namespace")} or spaces
    if len(spaces | own) != 1 or None in spaces:
        yield m.objects[0], f"objects lie in the namespaces {spaces | own}"


@rule
def enums(m: Manifests, _: World) -> Iterator[Complaint]:
    def walk(it: Object, value: Any) -> Iterator[Complaint]:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if key in ENUMS and isinstance(item, str) and item not in ENUMS[key]:
                if not (key == "protocol" and it["kind"] == "Gateway"):
                    yield it, f"{key} cannot be {item}"
            if key in ENUM_LISTS and not set(item) <= ENUM_LISTS[key]:
                yield it, f"{key} cannot be {item}"
            if isinstance(item, dict | list):
                yield from walk(it, item)

    for it in m.objects:
        yield from walk(it, it.get("spec", {}))


# ---- who finds whom


@rule
def workload_selects_its_pods(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        if not selects(it.spec["selector"], it.labels):
            yield it.object, "the selector does not match the template's labels"


@rule
def service_selects_servers_alone(m: Manifests, _: World) -> Iterator[Complaint]:
    for service in m.of("Service"):
        kinds = [it.kind for it in m.behind(service)]
        if not kinds:
            yield service, "selects no pods"
        elif "Job" in kinds:
            yield service, "selects the pods of a Job, which would be sent requests"


@rule
def service_ports_exist(m: Manifests, _: World) -> Iterator[Complaint]:
    for service in m.of("Service"):
        for port in service["spec"]["ports"]:
            target = port.get("targetPort", port["port"])
            if any(it.port(target) is None for it in m.behind(service)):
                yield service, f"no container has the port {target}"


@rule
def policies_select_pods(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("PodDisruptionBudget", "NetworkPolicy", "PodMonitor"):
        selector = it["spec"].get("podSelector", it["spec"].get("selector"))
        if not any(selects(selector, workload.labels) for workload in m.workloads):
            yield it, "selects no pods"


@rule
def monitors_find_their_port(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.of("ServiceMonitor"):
        selector = it["spec"]["selector"]
        services = [s for s in m.of("Service") if selects(selector, at(s, "metadata", "labels", default={}))]
        if not services:
            yield it, "selects no Service"
        for service in services:
            named = {port.get("name") for port in service["spec"]["ports"]}
            for endpoint in it["spec"]["endpoints"]:
                if endpoint.get("port") not in named:
                    yield it, f"{service['metadata']['name']} has no port of the name {endpoint.get('port')}"
    for it in m.of("PodMonitor"):
        for endpoint in it["spec"]["podMetricsEndpoints"]:
            if any(endpoint.get("port") not in workload.ports for workload in m.servers):
                yield it, f"no container has a port of the name {endpoint.get('port')}"
    if m.of("ServiceMonitor") and m.of("PodMonitor"):
        yield m.of("PodMonitor")[0], "and a ServiceMonitor: every series would be there twice"


@rule
def backends_exist(m: Manifests, _: World) -> Iterator[Complaint]:
    for ingress in m.of("Ingress"):
        for path in at(ingress, "spec", "rules", 0, "http", "paths", default=[]):
            service = path["backend"]["service"]
            yield from missing_backend(m, ingress, service["name"], **service["port"])
    for route in m.of("HTTPRoute"):
        for backend in [ref for one in route["spec"]["rules"] for ref in one.get("backendRefs", [])]:
            if backend.get("kind", "Service") == "Service":
                yield from missing_backend(m, route, backend["name"], number=backend.get("port"))


def missing_backend(
    m: Manifests, it: Object, service: str, name: str | None = None, number: int | None = None
) -> Iterator[Complaint]:
    found = m.find("Service", service)
    ports = at(found, "spec", "ports", default=[])
    if found is None:
        yield it, f"there is no Service {service}"
    elif not any(name == port.get("name") if name else number == port["port"] for port in ports):
        yield it, f"the Service {service} has no port {name or number}"


@rule
def routes_have_a_gateway(m: Manifests, _: World) -> Iterator[Complaint]:
    for route in m.of("HTTPRoute"):
        for parent in route["spec"]["parentRefs"]:
            gateway = m.find("Gateway", parent["name"])
            listeners = {listener["name"] for listener in at(gateway, "spec", "listeners", default=[])}
            if gateway is None or parent.get("sectionName") not in {None, *listeners}:
                yield route, f"there is no gateway {parent}"


@rule
def references_exist(m: Manifests, world: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for kind, name, key in references(it):
            keys = keys_of(m, world, kind, name)
            if keys is None:
                yield it.object, f"nobody makes the {kind} {name}"
            elif key is not None and key not in keys:
                yield it.object, f"the {kind} {name} has no key {key}"
        account = it.pod.get("serviceAccountName")
        if account and m.find("ServiceAccount", account) is None:
            yield it.object, f"there is no ServiceAccount {account}"
        for volume in it.volumes.values():
            claims = [
                at(volume, "persistentVolumeClaim", "claimName"),
                at(volume, "ephemeral", "volumeClaimTemplate", "spec", "dataSource", "name"),
            ]
            for claim in filter(None, claims):
                if m.find("PersistentVolumeClaim", claim) is None:
                    yield it.object, f"there is no claim {claim}"


def keys_of(m: Manifests, world: World, kind: str, name: str) -> Iterable[str] | None:
    """The keys of a ConfigMap or a secret, whoever makes it."""
    return at(m.find(kind, name), "data", default=world.given.get((kind, name)))


def references(it: Workload) -> Iterator[tuple[str, str, str | None]]:
    for container in it.containers:
        for variable in container.get("env", []):
            for source, kind in (("configMapKeyRef", "ConfigMap"), ("secretKeyRef", "Secret")):
                if found := at(variable, "valueFrom", source):
                    yield kind, found["name"], found["key"]
    for volume in it.volumes.values():
        if config := volume.get("configMap"):
            yield from (("ConfigMap", config["name"], item["key"]) for item in config.get("items", [{"key": None}]))
        if secret := volume.get("secret"):
            mounts = [mount for one in it.containers for mount in one.get("volumeMounts", [])]
            paths = [f"{mount['mountPath']}/" for mount in mounts if mount["name"] == volume["name"]]
            files = [(path, value) for path in paths for one in it.containers for value in values(one)]
            yield "Secret", secret["secretName"], None
            yield from (
                ("Secret", secret["secretName"], value.removeprefix(path)) for path, value in files if value.startswith(path)
            )


def values(container: Object) -> Iterator[str]:
    """What flags and variables are set to."""
    yield from flags(container).values()
    yield from (variable.get("value", "") for variable in container.get("env", []))


@rule
def jobs_outlive_a_change(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for kind, name, _key in references(it):
            if it.kind == "Job" and kind == "ConfigMap" and re.search(r"-[a-z0-9]{10}$", name):
                yield it.object, f"a Job cannot change, and {name} has another name after every change of its content"


@rule
def variables_are_defined(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        for container in it.containers:
            line = " ".join([*container.get("command", []), *container.get("args", [])])
            for name in set(re.findall(r"(?<!\$)\$\(([^)]+)\)", line)) - environment(container).keys():
                yield it.object, f"$({name}) is not defined"
            # One variable may refer to another that stands before it; otherwise the reference stays as it is.
            before: set[str] = set()
            for variable in container.get("env", []):
                for name in set(re.findall(r"(?<!\$)\$\(([^)]+)\)", variable.get("value", ""))) - before:
                    yield it.object, f"{variable['name']}: $({name}) is defined later, or nowhere"
                before.add(variable["name"])


@rule
def mounts_have_volumes(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        mounted = {mount["name"] for container in it.containers for mount in container.get("volumeMounts", [])}
        for name in mounted - it.volumes.keys():
            yield it.object, f"the volume {name} is mounted and not there"
        for name in it.volumes.keys() - mounted:
            yield it.object, f"the volume {name} is there and not mounted"


# ---- the server


@rule
def probes_ask_what_is_served(m: Manifests, world: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.serving:
            for kind in ("startupProbe", "readinessProbe", "livenessProbe"):
                probe = at(container, kind, "httpGet")
                if probe is None:
                    yield it.object, f"there is no {kind} over HTTP"
                elif probe["path"] not in world.routes:
                    yield it.object, f"{kind}: the server has no route {probe['path']}"
                elif it.port(probe["port"]) is None:
                    yield it.object, f"{kind}: no container has the port {probe['port']}"
    for it in m.of("ServiceMonitor", "PodMonitor"):
        for endpoint in it["spec"].get("endpoints", it["spec"].get("podMetricsEndpoints")):
            if endpoint.get("path", "/metrics") not in world.routes:
                yield it, f"the server has no route {endpoint['path']}"


@rule
def port_is_the_servers(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.serving:
            port = flags(container).get("--port", "8000")
            if port not in {str(one["containerPort"]) for one in container.get("ports", [])}:
                yield it.object, f"the server listens on {port}, which is no port of the container"


@rule
def variables_are_known(m: Manifests, world: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.containers:
            # Nobody complains of a variable that nobody reads, unlike of a flag.
            line = str([*container.get("args", []), *container.get("env", [])])
            for name in environment(container):
                flag = name.removeprefix("OCTAVO_").lower().replace("_", "-")
                ours = name.startswith("OCTAVO_") and re.search(rf"--{flag}[\s\[<]", world.help)
                theirs = name.startswith("OTEL_") and "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT" in world.help
                if not (ours or theirs or name in FURTHER_VARIABLES or f"$({name})" in line):
                    yield it.object, f"the server does not read {name}"


@rule
def flags_are_set_once(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.servers:
        for container in it.serving:
            given = {name[2:].replace("_", "-") for name in flags(container)}
            variables = {
                name.removeprefix("OCTAVO_").lower().replace("_", "-")
                for name in environment(container)
                if name.startswith("OCTAVO_")
            }
            files = [name for _, name, key in references(it) if key == "config.yaml"]
            contents = [at(m.find("ConfigMap", name), "data", "config.yaml", default="{}") for name in files]
            filed = {flag for content in contents for flag in yaml.safe_load(content)}
            for flag in (given & variables) | (filed & variables) | (filed & given):
                yield it.object, f"--{flag} is set in two places, and one is ignored"


@rule
def paths_are_public_and_served(m: Manifests, world: World) -> Iterator[Complaint]:
    for it in m.of("Ingress", "HTTPRoute"):
        for path in public_paths(it):
            if not any(route == path or route.startswith(f"{path}/") for route in world.routes):
                yield it, f"the server has no route {path}"
            elif path not in PUBLIC:
                yield it, f"{path} is not for the world"


def public_paths(it: Object) -> Iterator[str]:
    for one in it["spec"]["rules"]:
        if it["kind"] == "Ingress":
            yield from (path["path"] for path in one["http"]["paths"])
        elif one.get("backendRefs"):
            # Without a match a rule matches everything.
            yield from (at(match, "path", "value", default="/") for match in one.get("matches", [{}]))


@rule
def no_code_of_models(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        if any("--trust-remote-code" in flags(container) for container in it.containers):
            yield it.object, "--trust-remote-code"


@rule
def no_service_links(m: Manifests, _: World) -> Iterator[Complaint]:
    for it in m.workloads:
        if it.pod.get("enableServiceLinks", True):
            yield it.object, "a Service's variables could be taken for flags: enableServiceLinks must be false"
