"""One cluster for all tests, a namespace for each, and the figures of the run."""

import itertools
import pathlib
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator

import pytest

HERE = pathlib.Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "k8s")]

import tools  # noqa: E402
from control_plane import PLACE, Api, control_plane  # noqa: E402
from nodes import SURROUNDINGS, Kubelets, add_node  # noqa: E402
from processes import until  # noqa: E402

# Applied compositions and objects, for the last lines of a run.
APPLIED = {"compositions": 0, "objects": 0}
# No two tests share a node or a namespace, not even those of two runs against one server.
RUN = uuid.uuid4().hex[:6]
NUMBERS = itertools.count()


def established(api: Api) -> bool:
    """Whether all CRDs are served. `kubectl wait` fails on one that has no conditions yet."""
    found = api.ask("/apis/apiextensions.k8s.io/v1/customresourcedefinitions")["items"]
    conditions = [{it["type"]: it["status"] for it in crd.get("status", {}).get("conditions") or []} for crd in found]
    return all(it.get("Established") == "True" for it in conditions)


@pytest.fixture(scope="session")
def api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The API server, with the CRDs and what the compositions refer to."""
    tools.install()
    subprocess.run(["bash", HERE / "install.sh"], check=True)
    with control_plane(tmp_path_factory.mktemp("cluster")) as api:
        for path in sorted((PLACE / "crds").glob("*.yaml")):
            api.run(tools.KUBECTL, "apply", "--server-side", "-f", path).check_returncode()
        until("the CRDs are established", lambda: established(api), limit=120, pause=0.5)
        api.apply(SURROUNDINGS)
        yield api


@pytest.fixture(scope="session")
def kubelets(api: Api) -> Iterator[Kubelets]:
    kubelets = Kubelets(api)
    kubelets.start()
    yield kubelets
    kubelets.close()


@pytest.fixture
def nodes(api: Api, kubelets: Kubelets) -> Iterator[Callable[..., None]]:
    """Adds nodes with so many GPUs each, which go with the test."""
    names: list[str] = []

    def add(*gpus: int) -> None:
        for count in gpus:
            names.append(f"node-{RUN}-{next(NUMBERS)}")
            add_node(api, names[-1], count)

    yield add
    for name in names:
        api.ask(f"/api/v1/nodes/{name}", "DELETE")


@pytest.fixture
def namespace(api: Api) -> Iterator[Callable[..., str]]:
    """Makes a namespace with a Pod Security level; it goes with the test."""
    names: list[str] = []

    def make(level: str = "restricted") -> str:
        names.append(f"test-{RUN}-{next(NUMBERS)}")
        labels = {f"pod-security.kubernetes.io/{mode}": level for mode in ("enforce", "warn")}
        api.ask("/api/v1/namespaces", "POST", {"metadata": {"name": names[-1], "labels": labels}})
        return names[-1]

    yield make
    for name in names:
        # A pod that is left would take a node of the next test. The rest of the namespace may go when it likes.
        for kind in ("apps/v1/namespaces/{}/deployments", "batch/v1/namespaces/{}/jobs"):
            api.ask(f"/apis/{kind.format(name)}", "DELETE", {"propagationPolicy": "Background"})
        until("the pods are gone", lambda: not api.ask(f"/api/v1/namespaces/{name}/pods")["items"], limit=60)
        api.ask(f"/api/v1/namespaces/{name}", "DELETE")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if APPLIED["objects"]:
        version = (PLACE / "kubernetes").read_text().strip()
        counted = ", ".join(f"{count} {what}" for what, count in APPLIED.items())
        terminalreporter.write_line(f"Kubernetes {version}: {counted} applied")
