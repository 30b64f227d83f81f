"""A release of the chart, and the rollout of its Deployment."""

import pathlib

import render
from conftest import APPLIED
from control_plane import Api
from manifests import Object, parse
from processes import until
from test_compositions import settled, trouble


class Release:
    """A release `octavo` in a namespace of its own."""

    def __init__(self, api: Api, namespace: str) -> None:
        self.api, self.namespace = api, namespace

    def apply(self, *settings: str, force: bool = False, values: pathlib.Path | None = None) -> None:
        """Installs or upgrades, from the defaults and these settings."""
        words: list[object] = [word for one in settings for word in ("--set", one)]
        words += ["--values", values] if values else []
        words += ["--force-conflicts"] if force else []
        self.api.helm("upgrade", "--install", "octavo", render.CHART, "-n", self.namespace, *words)
        APPLIED["compositions"] += 1
        APPLIED["objects"] += len(parse(self.api.helm("get", "manifest", "octavo", "-n", self.namespace)))

    def roll_back(self) -> None:
        """Returns to the first revision."""
        self.api.helm("rollback", "octavo", "1", "-n", self.namespace)

    def object(self, place: str) -> Object:
        """An object of the namespace, by its group's path, kind and name."""
        group, kind, name = place.rsplit("/", 2)
        return self.api.ask(f"{group}/namespaces/{self.namespace}/{kind}/{name}")

    @property
    def deployment(self) -> Object:
        return self.object("/apis/apps/v1/deployments/octavo")

    @property
    def replicas(self) -> int:
        return self.deployment["spec"]["replicas"]

    def names(self, place: str) -> set[str]:
        """The names of all objects of a kind in the namespace."""
        group, kind = place.rsplit("/", 1)
        items = self.api.ask(f"{group}/namespaces/{self.namespace}/{kind}")["items"]
        return {it["metadata"]["name"] for it in items}

    def scale(self, replicas: int) -> None:
        self.api.kubectl("scale", "deployment/octavo", f"--replicas={replicas}", "-n", self.namespace)

    def runs(self) -> None:
        """Waits until every workload has the ready pods it asks for."""
        until(lambda: trouble(self.api, self.namespace), lambda: settled(self.api, self.namespace), limit=180)

    def finished(self) -> None:
        """Waits for the end of a rollout."""
        until(lambda: trouble(self.api, self.namespace), lambda: rolled_out(self.deployment), limit=180)


def rolled_out(deployment: Object) -> bool:
    """Whether all pods are ready and of the newest revision, and no others are left."""
    status, replicas = deployment["status"], deployment["spec"]["replicas"]
    current = status.get("observedGeneration", 0) >= deployment["metadata"]["generation"]
    return current and all(status.get(counted, 0) == replicas for counted in ("replicas", "updatedReplicas", "readyReplicas"))
