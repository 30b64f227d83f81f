"""An upgrade where objects are there already: the chart looks them up at a stand-in for the API server."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator

import pytest

import render
from tools import HELM

KINDS = {
    "v1": ["ConfigMap", "PersistentVolumeClaim", "Service", "ServiceAccount"],
    "apps/v1": ["Deployment"],
    "keda.sh/v1alpha1": ["ScaledObject"],
    "monitoring.coreos.com/v1": ["ServiceMonitor"],
    "networking.k8s.io/v1": ["Ingress", "NetworkPolicy"],
    "policy/v1": ["PodDisruptionBudget"],
}


def plural(kind: str) -> str:
    name = kind.lower()
    return f"{name[:-1]}ies" if name.endswith("y") else f"{name}{'es' if name.endswith('ss') else 's'}"


def group(version: str) -> dict:
    entry = {"groupVersion": version, "version": version.partition("/")[2]}
    return {"name": version.partition("/")[0], "versions": [entry], "preferredVersion": entry}


def resources(version: str) -> dict:
    found = [{"name": plural(kind), "kind": kind, "namespaced": True, "verbs": ["get", "list"]} for kind in KINDS[version]]
    return {"kind": "APIResourceList", "groupVersion": version, "resources": found}


DISCOVERY = {
    "/version": {"major": "1", "minor": "34", "gitVersion": "v1.34.0"},
    "/api": {"kind": "APIVersions", "versions": ["v1"]},
    "/apis": {"kind": "APIGroupList", "apiVersion": "v1", "groups": [group(version) for version in KINDS if "/" in version]},
    **{f"/{'apis' if '/' in version else 'api'}/{version}": resources(version) for version in KINDS},
}


@contextlib.contextmanager
def cluster(objects: dict[str, dict]) -> Iterator[str]:
    """The address of an API server that has these objects, by their paths, and is only read."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            found = (DISCOVERY | objects).get(self.path.partition("?")[0])
            status = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound", "code": 404}
            body = json.dumps(status if found is None else found).encode()
            self.send_response(404 if found is None else 200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()


def upgrade(objects: dict[str, dict], values: str):
    with cluster(objects) as address:
        server = ("--dry-run=server", "--kube-apiserver", address, "--kube-token", "t", "--disable-openapi-validation")
        return render.run(HELM, "template", "octavo", render.CHART, "-n", "octavo", "--is-upgrade", *server, "--set", values)


def deployment(replicas: int) -> dict[str, dict]:
    place = "/apis/apps/v1/namespaces/octavo/deployments/octavo"
    return {place: {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "octavo"}, "spec": {"replicas": replicas}}}


def claim(size: str, storage_class: str) -> dict[str, dict]:
    spec = {"resources": {"requests": {"storage": size}}, "storageClassName": storage_class, "accessModes": ["ReadWriteMany"]}
    place = "/api/v1/namespaces/octavo/persistentvolumeclaims/octavo-models"
    return {place: {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "octavo-models"}, "spec": spec}}


@pytest.mark.parametrize(("live", "low", "rendered"), [(5, 2, 5), (0, 0, 0), (0, 2, 1), (None, 2, None)])
def test_an_autoscaler_takes_over_what_runs(live: int | None, low: int, rendered: int | None) -> None:
    """Without the field a release that turns autoscaling on would fall to one replica."""
    scaling = f"autoscaling.type=keda,metrics.monitor=service,ingress.enabled=true,autoscaling.minReplicas={low}"
    done = upgrade({} if live is None else deployment(live), scaling)
    assert done.returncode == 0, done.stderr
    (server,) = render.manifests(done.stdout).servers
    assert server.spec.get("replicas") == rendered


def test_replicas_that_are_set_win_over_what_runs() -> None:
    (server,) = render.manifests(upgrade(deployment(5), "replicas=3").stdout).servers
    assert server.spec["replicas"] == 3


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ("modelCache.size=50Gi", "has 100Gi and cannot shrink"),
        ("modelCache.size=100G", "has 100Gi and cannot shrink"),
        ("modelCache.size=100Gi,modelCache.storageClassName=slow", "cannot change: the claim octavo-models has the class fast"),
        ("modelCache.size=100Gi,modelCache.storageClassName=fast", None),
        ("modelCache.size=1Ti", None),
        ("modelCache.size=50Gi,modelCache.existingClaim=other", None),
        ("modelCache.type=clone,modelCache.size=100Gi", "needs the access mode ReadWriteOnce, and the claim octavo-models has ReadWriteMany"),
        ("modelCache.type=clone,modelCache.existingClaim=other", None),
    ],
)
def test_a_claim_keeps_its_size_its_class_and_its_access_mode(values: str, reason: str | None) -> None:
    done = upgrade(claim("100Gi", "fast"), f"modelCache.type=pvc,{values}")
    assert (done.returncode == 0) == (reason is None), done.stderr
    assert reason is None or reason in done.stderr
