"""Two replicas behind nginx under load: a rolling restart loses no request, a killed replica only its own."""

import contextlib
import dataclasses
import signal
import time

import pytest

import client
from kubelet import Cluster, lifecycle
from nginx import proxying
from processes import until

# All times of the manifest, so that a rollout takes seconds. Endpoints take a second and a half at full scale.
SCALE = 0.2
LAG = 0.3
TOKENS = 3_000
FLAGS = ["--max-model-len", "4096", "--num-gpu-blocks-override", "2000", "--stream-interval", "50"]


class Clients(client.Team):
    """Closed-loop clients that stream, each with its next request as soon as the last one has ended."""

    def __init__(self, port, count=6, retries=0):
        super().__init__(port, count)
        self.retries = retries
        self.lost = []
        self.backends = []

    def turn(self, index, turn):
        prompt = f"{index} {turn}"
        for attempt in range(self.retries + 1):
            try:
                self.backends.append(client.stream(self.port, prompt, TOKENS).backend)
                return
            except client.Failure as failure:
                self.failures.append(failure)
                time.sleep(0.2 * 2**attempt)
        self.lost.append(prompt)


@contextlib.contextmanager
def deployment(model, folder, life, next_upstream="off"):
    """The replicas and the proxy in front of them. `off`: a request that fails is not tried elsewhere."""
    with proxying(folder / "nginx", [], next_upstream=next_upstream) as nginx:
        cluster = Cluster(life, model, folder, nginx.configure, scale=SCALE, lag=LAG, flags=FLAGS)
        try:
            cluster.wait_ready()
            yield cluster, nginx
        finally:
            cluster.close()


def settle(clients, least):
    """Waits until that many more requests have ended well."""
    goal = len(clients.backends) + least
    until(f"{least} more requests", lambda: len(clients.backends) >= goal)


@pytest.fixture(scope="module")
def life():
    life = lifecycle()
    print(f"\nlifecycle: {life}")
    return life


def test_the_grace_covers_what_is_to_happen_in_it(life):
    assert life.grace >= life.pre_stop + life.shutdown_timeout + 15
    assert life.readiness.path == "/health" and life.liveness.path == "/live"


def test_a_hung_replica_is_replaced_with_the_grace_of_the_probe(model, tmp_path, life):
    """A stopped process answers nothing and takes no SIGTERM, as one whose device hangs and never returns."""
    assert life.liveness.grace is not None and life.liveness.grace < life.grace / 10
    with deployment(model, tmp_path, life) as (cluster, _):
        victim, other = cluster.pods
        hung = victim.process
        hung.send_signal(signal.SIGSTOP)
        until("the kubelet has started it again", lambda: victim.restarts == 1, limit=120)
        until("it is ready", victim.ready.is_set, limit=120)
    assert hung.returncode == victim.status == -signal.SIGKILL
    assert other.restarts == 0


@pytest.mark.parametrize("pre_stop", [True, False], ids=["with preStop", "by the server's own drain"])
def test_a_rolling_restart_loses_nothing(model, tmp_path, life, pre_stop):
    life = life if pre_stop else dataclasses.replace(life, pre_stop=0)
    with deployment(model, tmp_path, life) as (cluster, nginx), Clients(nginx.port) as clients:
        settle(clients, 4)
        old = [pod.port for pod in cluster.pods]
        statuses = cluster.rolling_restart()
        settle(clients, 4)
    new = {f"127.0.0.1:{pod.port}" for pod in cluster.pods}
    print(f"\n{len(clients.backends)} requests, {len(clients.failures)} failed")
    assert [str(failure) for failure in clients.failures] == []
    assert statuses == [0, 0], "a pod was killed, or did not end well"
    assert not {f"127.0.0.1:{port}" for port in old} & new
    assert new <= set(clients.backends), "a new pod got no request"
    assert all(pod.restarts == 0 for pod in cluster.pods), "a liveness probe failed"


def test_without_a_drain_requests_are_lost(model, tmp_path, life):
    """The harness sees what the drain prevents."""
    careless = dataclasses.replace(life, pre_stop=0, shutdown_timeout=0, shutdown_lag=0)
    with deployment(model, tmp_path, careless) as (cluster, nginx), Clients(nginx.port) as clients:
        settle(clients, 4)
        cluster.pods[0].delete()
        until("a request is lost", lambda: clients.failures)


def test_a_killed_replica_takes_only_its_own_requests(model, tmp_path, life):
    with deployment(model, tmp_path, life, next_upstream="error timeout") as (cluster, nginx):
        with Clients(nginx.port, retries=5) as clients:
            settle(clients, 4)
            victim, other = cluster.pods
            victim.process.kill()
            until("the kubelet has started it again", lambda: victim.restarts == 1)
            until("it is ready", victim.ready.is_set)
            time.sleep(LAG)
            # Both serve again.
            begin = len(clients.backends)
            until("requests of both", lambda: len(set(clients.backends[begin:])) == 2)
    print(f"\n{len(clients.backends)} requests, {len(clients.failures)} attempts failed, {len(clients.lost)} lost")
    assert clients.failures, "nothing ran on the replica that was killed"
    # A retried attempt names every server that was asked: the last one is the one that answered.
    backends = {str(failure.backend).split(", ")[-1] for failure in clients.failures}
    assert backends <= {f"127.0.0.1:{victim.port}"}, [str(failure) for failure in clients.failures]
    assert clients.lost == []
    assert other.restarts == 0
