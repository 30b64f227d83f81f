"""Rendered manifests as the lint reads them."""

import dataclasses
import re
from typing import Any

import yaml

Object = dict[str, Any]

CLUSTER_SCOPED = {"Namespace", "PersistentVolume", "StorageClass", "ClusterRole", "ClusterRoleBinding"}

# https://kubernetes.io/docs/reference/kubernetes-api/common-definitions/quantity/
QUANTITY = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei|[eE][+-]?\d+)?")
SCALE = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}


def quantity(text: str | int | float) -> float | None:
    """What a quantity comes to, or None if it is none."""
    found = QUANTITY.fullmatch(str(text))
    if found is None:
        return None
    suffix = found.group(2) or ""
    return (
        float(str(text))
        if suffix[:1] in ("", "e", "E") and suffix not in SCALE
        else (float(found.group(1)) * SCALE.get(suffix, 1))
    )


def parse(text: str) -> list[Object]:
    """The documents of a stream, empty ones left out."""
    return [document for document in yaml.safe_load_all(text) if document]


def at(value: Any, *path: str | int, default: Any = None) -> Any:
    """What lies at a path of keys and indices; `default` where it ends early."""
    for key in path:
        try:
            value = value[key]
        except (KeyError, IndexError, TypeError):
            return default
    return default if value is None else value


def selects(selector: dict[str, Any] | None, labels: dict[str, str]) -> bool:
    """Whether a selector (a map, or matchLabels and matchExpressions) matches; an empty one matches everything."""
    if selector is None:
        return False
    if not selector.keys() <= {"matchLabels", "matchExpressions"}:
        selector = {"matchLabels": selector}
    exact = all(labels.get(key) == value for key, value in (selector.get("matchLabels") or {}).items())
    return exact and all(holds(expression, labels) for expression in selector.get("matchExpressions") or [])


def holds(expression: Object, labels: dict[str, str]) -> bool:
    key, operator = expression["key"], expression["operator"]
    match operator:
        case "In":
            return labels.get(key) in expression["values"]
        case "NotIn":
            return labels.get(key) not in expression["values"]
        case "Exists":
            return key in labels
        case "DoesNotExist":
            return key not in labels
    raise ValueError(f"no such operator: {operator}")


@dataclasses.dataclass(frozen=True)
class Workload:
    """What makes pods."""

    object: Object

    @property
    def kind(self) -> str:
        return self.object["kind"]

    @property
    def spec(self) -> Object:
        return self.object["spec"]

    @property
    def labels(self) -> dict[str, str]:
        return at(self.spec, "template", "metadata", "labels", default={})

    @property
    def pod(self) -> Object:
        return self.spec["template"]["spec"]

    @property
    def containers(self) -> list[Object]:
        return [*at(self.pod, "initContainers", default=[]), *self.pod["containers"]]

    @property
    def serving(self) -> list[Object]:
        """The containers that run all the time."""
        return self.pod["containers"]

    @property
    def volumes(self) -> dict[str, Object]:
        return {volume["name"]: volume for volume in at(self.pod, "volumes", default=[])}

    @property
    def ports(self) -> dict[str, int]:
        """Numbers of the named ports."""
        return {
            port["name"]: port["containerPort"]
            for container in self.containers
            for port in container.get("ports", [])
            if "name" in port
        }

    def port(self, reference: str | int) -> int | None:
        """The number of a port that is named or given, if a container has it."""
        number = self.ports.get(reference) if isinstance(reference, str) else reference
        return number if number in self.ports.values() else None


class Manifests:
    """The objects of one rendering, and of one namespace."""

    def __init__(self, objects: list[Object]):
        self.objects = objects

    def of(self, *kinds: str) -> list[Object]:
        return [it for it in self.objects if it["kind"] in kinds]

    def find(self, kind: str, name: str) -> Object | None:
        return next((it for it in self.of(kind) if it["metadata"]["name"] == name), None)

    @property
    def workloads(self) -> list[Workload]:
        return [Workload(it) for it in self.of("Deployment", "StatefulSet", "DaemonSet", "Job")]

    @property
    def servers(self) -> list[Workload]:
        """The workloads that serve; a Job only prepares."""
        return [it for it in self.workloads if it.kind != "Job"]

    def behind(self, service: Object) -> list[Workload]:
        """The workloads whose pods a Service sends to."""
        return [it for it in self.workloads if selects(at(service, "spec", "selector"), it.labels)]


def flags(container: Object) -> dict[str, str]:
    """The flags of a command line, `--flag=value` or `--flag value`; a switch is empty."""
    words = [*container.get("command", []), *container.get("args", [])]
    found: dict[str, str] = {}
    for word, following in zip(words, [*words[1:], "--"], strict=True):
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            found[name] = value if equals else ("" if following.startswith("--") else following)
    return found


def environment(container: Object) -> dict[str, Object]:
    return {variable["name"]: variable for variable in container.get("env", [])}
