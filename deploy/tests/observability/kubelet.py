"""What Kubernetes does to pods in a rollout, for real processes: probes, endpoints, preStop, grace, restarts.

Every time is the manifest's times `scale`. Endpoints reach the proxy `lag` seconds after they changed, which is why a
pod still gets requests when it has been told to go.
"""

import dataclasses
import os
import pathlib
import queue
import re
import signal
import subprocess
import threading
import time

import yaml

from places import DEPLOY, free_port
from processes import get, start
from serving import OWN, command

MANIFEST = pathlib.Path(os.environ.get("OCTAVO_DEPLOYMENT", DEPLOY / "k8s" / "base" / "deployment.yaml"))


@dataclasses.dataclass(frozen=True)
class Probe:
    path: str
    period: float
    failures: int
    # Of the container that it ends; without one the pod's holds.
    grace: float | None = None


@dataclasses.dataclass(frozen=True)
class Lifecycle:
    """What a Deployment says of its pods' beginning and end, in seconds."""

    replicas: int
    startup: Probe
    readiness: Probe
    liveness: Probe
    pre_stop: float
    grace: float
    shutdown_timeout: float
    shutdown_lag: float
    source: str


def probe(container, name):
    spec = container[f"{name}Probe"]
    return Probe(spec["httpGet"]["path"], spec.get("periodSeconds", 10), spec.get("failureThreshold", 3), spec.get("terminationGracePeriodSeconds"))


def flag(words, name, default):
    values = [re.fullmatch(rf"--{name}=(\d+)", word) for word in words]
    separate = [re.fullmatch(r"\d+", after) for word, after in zip(words, words[1:]) if word == f"--{name}"]
    found = [int(match[match.lastindex or 0]) for match in [*values, *separate] if match]
    return found[-1] if found else default


def lifecycle(path=MANIFEST):
    """As the manifest has it; without one, the values that deploy/ documents."""
    if not path.is_file():
        startup, readiness = Probe("/health", 5, 360), Probe("/health", 2, 1)
        return Lifecycle(2, startup, readiness, Probe("/live", 5, 3, 5), 15, 60, 25, 5, "the documented values")
    documents = yaml.safe_load_all(path.read_text())
    deployment = next(document for document in documents if document and document["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    container = pod["containers"][0]
    words = [str(word) for word in [*container.get("command", []), *container.get("args", [])]]
    return Lifecycle(
        replicas=deployment["spec"].get("replicas", 1),
        startup=probe(container, "startup"),
        readiness=probe(container, "readiness"),
        liveness=probe(container, "liveness"),
        pre_stop=container.get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0),
        grace=pod.get("terminationGracePeriodSeconds", 30),
        shutdown_timeout=flag(words, "shutdown-timeout", 25),
        shutdown_lag=flag(words, "shutdown-lag", 5),
        source=path.name,
    )


class Endpoints:
    """The ports of the ready pods, handed to the proxy a while after each change."""

    def __init__(self, apply, lag):
        self.apply = apply
        self.lag = lag
        self.ports = []
        self.lock = threading.Lock()
        self.changes = queue.Queue()
        threading.Thread(target=self.publish, daemon=True).start()

    def set(self, port, ready):
        with self.lock:
            if ready == (port in self.ports):
                return
            self.ports = [*self.ports, port] if ready else [other for other in self.ports if other != port]
            self.changes.put((time.monotonic() + self.lag, list(self.ports)))

    def publish(self):
        while (change := self.changes.get()) is not None:
            due, ports = change
            time.sleep(max(0.0, due - time.monotonic()))
            self.apply(ports)

    def close(self):
        self.changes.put(None)


class Pod:
    """A server under a kubelet."""

    def __init__(self, cluster):
        self.cluster = cluster
        self.port = free_port()
        self.ready = threading.Event()
        self.going = threading.Event()
        self.restarts = 0
        # Of the container before.
        self.status = None
        self.process = self.launch()
        self.thread = threading.Thread(target=self.watch, daemon=True)
        self.thread.start()

    def launch(self):
        cluster = self.cluster
        times = [("--shutdown-timeout", cluster.life.shutdown_timeout), ("--shutdown-lag", cluster.life.shutdown_lag)]
        flags = [
            word for name, seconds in times for word in (name, max(int(seconds > 0), round(seconds * cluster.scale)))
        ]
        line = command(*cluster.flags, *flags, model=cluster.model, port=self.port)
        return start(line, cluster.folder / f"pod-{self.port}.log", **OWN)

    def succeeds(self, probe):
        return get(f"http://127.0.0.1:{self.port}{probe.path}", timeout=2)[0] == 200

    def pause(self, seconds):
        self.going.wait(seconds * self.cluster.scale)

    def watch(self):
        """Probes until the pod is told to go; a container that ended is started again."""
        life = self.cluster.life
        while not self.going.is_set():
            failures = 0
            while not self.going.is_set() and not self.succeeds(life.startup):
                failures += 1
                assert failures < life.startup.failures, "the pod did not start"
                self.pause(life.startup.period)
            self.probe()
            if not self.going.is_set():
                self.status = self.end(life.grace if life.liveness.grace is None else life.liveness.grace)
                self.restarts += 1
                self.process = self.launch()

    def probe(self):
        """Readiness and liveness of a pod that has started, until it has to be started again."""
        life = self.cluster.life
        unready = dead = 0
        alive_at = time.monotonic() + life.liveness.period * self.cluster.scale
        while not self.going.is_set():
            unready = 0 if self.succeeds(life.readiness) else unready + 1
            if unready == 0 or unready >= life.readiness.failures:
                self.mark(unready == 0)
            if time.monotonic() >= alive_at:
                dead = 0 if self.succeeds(life.liveness) else dead + 1
                alive_at += life.liveness.period * self.cluster.scale
            if dead >= life.liveness.failures or self.process.poll() is not None:
                self.mark(False)
                return
            self.pause(life.readiness.period)

    def mark(self, ready):
        (self.ready.set if ready else self.ready.clear)()
        if not self.going.is_set():
            self.cluster.endpoints.set(self.port, ready)

    def delete(self):
        """Endpoint out, preStop, SIGTERM, grace. The exit status; negative if it had to be killed."""
        self.going.set()
        self.thread.join()
        self.cluster.endpoints.set(self.port, False)
        return self.end(self.cluster.life.grace)

    def end(self, grace):
        """preStop, SIGTERM and, after `grace` seconds in all, SIGKILL. A hook that takes the whole grace leaves 2 s."""
        if self.process.poll() is not None:
            return self.process.returncode
        scale = self.cluster.scale
        hook = min(self.cluster.life.pre_stop, grace)
        time.sleep(hook * scale)
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(max(grace - hook, 2) * scale)
        except subprocess.TimeoutExpired:
            self.process.kill()
            return self.process.wait()


class Cluster:
    """The replicas of a Deployment."""

    def __init__(self, life, model, folder, apply, *, scale, lag, flags=()):
        self.life, self.model, self.folder, self.scale, self.flags = life, model, folder, scale, flags
        self.endpoints = Endpoints(apply, lag)
        self.pods = [Pod(self) for _ in range(life.replicas)]

    def wait_ready(self, limit=30):
        for pod in self.pods:
            assert pod.ready.wait(limit), "a pod did not become ready"
        time.sleep(self.endpoints.lag + 0.2)

    def rolling_restart(self):
        """One after the other, the new pod in the place of the old one: maxSurge 0, maxUnavailable 1."""
        statuses = []
        for index, pod in enumerate(self.pods):
            statuses.append(pod.delete())
            self.pods[index] = Pod(self)
            self.wait_ready()
        return statuses

    def close(self):
        self.endpoints.close()
        for pod in self.pods:
            pod.going.set()
            pod.thread.join(5)
            pod.process.kill()
            pod.process.wait()
