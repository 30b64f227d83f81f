"""The renderings under test: of kustomize, of Helm, and which of them must be equal."""

import copy
import pathlib
import re
import subprocess

import yaml

from manifests import Manifests, Object, parse
from places import DEPLOY, ROOT  # noqa: F401
from tools import HELM, KUBECTL

CHART = DEPLOY / "helm" / "octavo"
ADDONS = DEPLOY / "helm" / "addons"
GOLDEN = DEPLOY / "helm" / "golden"
COMPONENTS = DEPLOY / "k8s" / "components"
VALUES = CHART / "ci"

KUSTOMIZATIONS = {
    "base": DEPLOY / "k8s" / "base",
    **{path.name: path for path in sorted((DEPLOY / "k8s" / "overlays").iterdir())},
}
# Values of the chart; those with the name of a kustomization must render the same.
CHARTS = {"base": None, **{path.stem: path for path in sorted(VALUES.glob("*.yaml"))}}
SHARED = sorted(KUSTOMIZATIONS.keys() & CHARTS.keys())
# Renderings that are kept as files.
SNAPSHOTS = ["base", "production"]
# Components that ovh/mks.md offers, and the line of the overlay that they replace.
OFFERED = {
    "keys and traces": ("- ../../components/servicemonitor", ["servicemonitor", "api-key", "ingress-nginx-tls", "otel"]),
    "named keys": ("- ../../components/servicemonitor", ["servicemonitor", "api-key", "api-keys-file"]),
    "a gateway": ("- ../../components/ingress-nginx", ["gateway-api", "api-key"]),
}


def run(*command: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(word) for word in command], text=True, capture_output=True)


def kustomize(folder: pathlib.Path) -> str:
    done = run(KUBECTL, "kustomize", folder)
    assert done.returncode == 0, f"kubectl kustomize {folder}: {done.stderr}"
    # Deprecated fields are warned of.
    assert not done.stderr, done.stderr
    return done.stdout


def template(*arguments: object) -> subprocess.CompletedProcess[str]:
    """`helm template` as a release `octavo` in the namespace `octavo`."""
    return run(HELM, "template", "octavo", CHART, "--namespace", "octavo", *arguments)


def helm(values: pathlib.Path | None) -> str:
    done = template(*(["--values", values] if values else []))
    assert done.returncode == 0, f"helm template {values}: {done.stderr}"
    return done.stdout


def components_of(folder: pathlib.Path) -> set[str]:
    """Names of the components that a kustomization takes."""
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    return {pathlib.Path(path).name for path in content.get("components", [])}


def comparable(text: str) -> dict[tuple[str, str], Object]:
    """The objects of a rendering, without what only one of the two tools adds: labels and hashes."""
    objects = [copy.deepcopy(it) for it in parse(text) if it["kind"] != "Namespace"]
    hashed = {
        it["metadata"]["name"]: re.sub(r"-[a-z0-9]{10}$", "", it["metadata"]["name"])
        for it in objects
        if it["kind"] == "ConfigMap"
    }
    hashed |= {
        it["metadata"]["name"]: re.sub(r"-[0-9a-f]{8}$", "", it["metadata"]["name"])
        for it in objects
        if it["kind"] == "Job"
    }
    return {(it["kind"], it["metadata"]["name"]): it for it in map(lambda it: plain(it, hashed), objects)}


def plain(value, hashed: dict[str, str]):
    """A value with its names unhashed and a configuration read, without the labels and annotations of the tools."""
    match value:
        case str():
            return hashed.get(value, value)
        case list():
            return [plain(item, hashed) for item in value]
        case dict():
            found = {}
            for key, item in value.items():
                if key == "labels":
                    item = {k: v for k, v in item.items() if not re.match(r"helm\.sh/|app\.kubernetes\.io/", k)}
                elif key == "annotations":
                    item = {k: v for k, v in item.items() if not re.match(r"helm\.sh/|checksum/", k)}
                elif key == "config.yaml" and isinstance(item, str):
                    item = yaml.safe_load(item)
                item = plain(item, hashed)
                # What is empty on one side may be missing on the other.
                if item not in ({}, []):
                    found[key] = sorted(item, key=by_name) if isinstance(item, list) and named(item) else item
            return found
    return value


def named(items: list) -> bool:
    """Whether a list is a map by name, as Kubernetes merges it: its order means nothing."""
    return all(isinstance(item, dict) and "name" in item for item in items)


def by_name(item: Object) -> str:
    return str(item["name"])


def manifests(text: str) -> Manifests:
    return Manifests(parse(text))


def example(renderings: dict[str, Manifests], name: str) -> Manifests:
    """A rendering by its own name; the one of kustomize where both tools have it."""
    return renderings[f"{'kustomize' if name in KUSTOMIZATIONS else 'helm'} {name}"]
