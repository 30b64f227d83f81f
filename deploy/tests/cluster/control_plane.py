"""etcd, the API server, the controllers and the scheduler of Kubernetes on 127.0.0.1, and a client for them."""

import contextlib
import json
import pathlib
import ssl
import subprocess
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import trustme
import yaml

from places import TARGET, free_port
from processes import get, start, stop, until
from tools import HELM, KUBECTL

PLACE = TARGET / "cluster"
TOKEN = "cluster-tests"
# Nobody reports for the nodes of these tests, which this controller would take for lost.
CONTROLLERS = "*,-node-lifecycle-controller"


class Refused(Exception):
    """What the API server, or Helm, says no to."""


class Api:
    """A client: plain requests for what is done often, kubectl and Helm for what operators do."""

    def __init__(self, url: str, folder: pathlib.Path, authority: pathlib.Path) -> None:
        self.url, self.config = url, folder / "kubeconfig"
        self.context = ssl.create_default_context(cafile=str(authority))
        cluster = {"server": url, "certificate-authority": str(authority)}
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "c", "cluster": cluster}],
            "users": [{"name": "u", "user": {"token": TOKEN}}],
            "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
            "current-context": "x",
        }
        self.config.write_text(yaml.safe_dump(content))
        # For Helm, which keeps files of its own.
        self.environment = {"KUBECONFIG": str(self.config), "HOME": str(folder), "PATH": "/usr/bin:/bin"}

    def ask(self, path: str, method: str = "GET", body: Any = None, kind: str = "application/json") -> Any:
        """The JSON of an answer; KeyError where there is no such object, Refused for other refusals."""
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {TOKEN}", "Content-Type": kind}
        request = urllib.request.Request(self.url + path, data, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=30, context=self.context) as answer:
                return json.load(answer)
        except urllib.error.HTTPError as refusal:
            text = refusal.read().decode()
            raise KeyError(path) if refusal.code == 404 else Refused(text) from None

    def patch(self, path: str, body: Any) -> Any:
        return self.ask(path, "PATCH", body, "application/merge-patch+json")

    def ready(self) -> bool:
        with contextlib.suppress(OSError, Refused, ValueError, KeyError):
            request = urllib.request.Request(f"{self.url}/readyz", headers={"Authorization": f"Bearer {TOKEN}"})
            with urllib.request.urlopen(request, timeout=5, context=self.context) as answer:
                return answer.status == 200
        return False

    def run(self, *words: object, stdin: str | None = None) -> subprocess.CompletedProcess[str]:
        command = [str(word) for word in words]
        return subprocess.run(command, input=stdin, text=True, capture_output=True, env=self.environment, timeout=120)

    def kubectl(self, *words: object, stdin: str | None = None) -> str:
        """The output of kubectl; Refused if it fails or warns."""
        done = self.run(KUBECTL, *words, "--warnings-as-errors", stdin=stdin)
        if done.returncode != 0:
            raise Refused(done.stderr)
        return done.stdout

    def apply(self, text: str, namespace: str = "default", *flags: str) -> None:
        """Applies objects on the server's side, with unknown fields refused."""
        self.kubectl("apply", "--server-side", "--validate=strict", "-n", namespace, *flags, "-f", "-", stdin=text)

    def helm(self, *words: object) -> str:
        """The output of Helm; Refused if it fails or warns."""
        done = self.run(HELM, *words)
        if done.returncode != 0 or "warn" in done.stderr.lower():
            raise Refused(done.stderr)
        return done.stdout


def write(path: pathlib.Path, *blobs: trustme.Blob) -> pathlib.Path:
    path.write_bytes(b"".join(blob.bytes() for blob in blobs))
    return path


@contextlib.contextmanager
def control_plane(folder: pathlib.Path) -> Iterator[Api]:
    """A cluster without nodes inside the block; its files and logs are in `folder`."""
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    ca = write(folder / "ca.crt", authority.cert_pem)
    certificate = write(folder / "tls.crt", *issued.cert_chain_pems)
    key = write(folder / "tls.key", issued.private_key_pem)
    tokens = folder / "tokens.csv"
    tokens.write_text(f"{TOKEN},admin,admin,system:masters\n")
    etcd, peers = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    port = free_port()
    api = Api(f"https://127.0.0.1:{port}", folder, ca)
    with contextlib.ExitStack() as stack:

        def run(name: str, *flags: str) -> subprocess.Popen:
            program = PLACE / "bin" / name
            assert program.exists(), f"{program} is not there: run deploy/tests/cluster/install.sh"
            process = start([program, *flags], folder / f"{name}.log")
            stack.callback(stop, process)
            return process

        places = (f"--listen-client-urls={etcd}", f"--advertise-client-urls={etcd}", f"--listen-peer-urls={peers}")
        run("etcd", f"--data-dir={folder / 'etcd'}", *places, f"--initial-advertise-peer-urls={peers}", f"--initial-cluster=default={peers}")
        until("etcd answers", lambda: get(f"{etcd}/health")[0] == 200, limit=120)
        process = run(
            "kube-apiserver",
            f"--etcd-servers={etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={port}",
            f"--tls-cert-file={certificate}",
            f"--tls-private-key-file={key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=AlwaysAllow",
            "--service-cluster-ip-range=10.0.0.0/20",
            "--endpoint-reconciler-type=none",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={key}",
            f"--service-account-signing-key-file={key}",
        )

        def answers() -> bool:
            assert process.poll() is None, (folder / "kube-apiserver.log").read_text()[-4000:]
            return api.ready()

        until("the API server is ready", answers, limit=300)
        common = (f"--kubeconfig={api.config}", "--leader-elect=false", "--secure-port=0")
        accounts = (f"--service-account-private-key-file={key}", f"--root-ca-file={ca}")
        run("kube-controller-manager", *common, *accounts, f"--controllers={CONTROLLERS}")
        run("kube-scheduler", *common)
        yield api
