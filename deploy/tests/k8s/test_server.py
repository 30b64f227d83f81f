"""The real server, started as the renderings start it: takes their flags, answers their probes, drains as they ask."""

import pathlib
import signal
import subprocess
import time
import urllib.error
import urllib.request

import pytest
import yaml

import render
from manifests import Manifests, Workload, at, environment
from serving import TINY, serving

RENDERINGS = [f"kustomize {name}" for name in render.KUSTOMIZATIONS] + [f"helm {name}" for name in render.CHARTS]
KEYS = "first-key second-key"


def variables(m: Manifests, container: dict) -> dict[str, str]:
    """The environment of a container, as the kubelet would fill it in; secrets are KEYS."""
    found = {}
    for name, variable in environment(container).items():
        if source := at(variable, "valueFrom", "configMapKeyRef"):
            found[name] = m.find("ConfigMap", source["name"])["data"][source["key"]]
        elif at(variable, "valueFrom", "secretKeyRef"):
            found[name] = KEYS
        elif source := at(variable, "valueFrom", "resourceFieldRef", "resource"):
            found[name] = at(container, "resources", *source.split("."))
        elif at(variable, "valueFrom", "fieldRef"):
            found[name] = "x"
        else:
            found[name] = variable["value"]
    return found


def started(m: Manifests, it: Workload, folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a workload's container, on a free port and with its configuration in `folder`."""
    container = it.pod["containers"][0]
    assert "command" not in container, "the image's entry point is octavo"
    given = variables(m, container) | {"HOME": str(folder), "HF_HOME": str(folder)}
    for config in m.of("ConfigMap"):
        (folder / "config.yaml").write_text(config["data"].get("config.yaml", "{}"))
    arguments = []
    for word in container["args"]:
        for name, value in given.items():
            word = word.replace(f"$({name})", value)
        arguments.append(word.replace("/etc/octavo", str(folder)).replace("--port=8000", "--port=0"))
    if "--port" in arguments:
        arguments[arguments.index("--port") + 1] = "0"
    return arguments, given


def run(octavo: pathlib.Path, arguments: list[str], given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Starts it where there is no model, so that a command line that is understood ends there."""
    given = {"HF_HUB_OFFLINE": "1", **given}
    return subprocess.run([octavo, *arguments], env=given, capture_output=True, text=True, timeout=30)


@pytest.mark.parametrize("name", RENDERINGS)
def test_command_lines_are_understood(
    name: str, renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    m = renderings[name]
    for it in m.workloads:
        done = run(octavo, *started(m, it, tmp_path))
        assert done.returncode == 1 and "offline mode is on" in done.stderr, done.stderr


def test_command_lines_that_are_not_understood_are_noticed(
    renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    m = renderings["kustomize production"]
    arguments, given = started(m, m.servers[0], tmp_path)
    assert run(octavo, [*arguments, "--no-such-flag"], given).returncode == 2
    assert run(octavo, arguments, {**given, "OCTAVO_DTYPE": "decimal"}).returncode == 2
    (tmp_path / "config.yaml").write_text("max-model-length: 8192\n")
    assert run(octavo, arguments, given).returncode == 2


def status(url: str, path: str, key: str | None = None) -> int:
    request = urllib.request.Request(url + path, headers={"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        return error.code


def test_probes_keys_and_drain(renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As a kubelet and a load balancer see the server of `production`."""
    m = renderings["kustomize production"]
    it = m.servers[0]
    arguments, given = started(m, it, tmp_path)
    config = yaml.safe_load((tmp_path / "config.yaml").read_text())
    # All that is not the rendering's: a model that is there, and a context that it has.
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(config | {"max-model-len": 256}))
    container = it.pod["containers"][0]
    probes = ("startupProbe", "readinessProbe", "livenessProbe")
    startup, ready, live = (container[probe]["httpGet"]["path"] for probe in probes)
    with serving(*arguments, **{**given, "OCTAVO_MODEL": str(TINY)}) as (url, server):
        assert [status(url, path) for path in (startup, ready, live, "/metrics")] == [200] * 4
        assert status(url, "/v1/models") == 401 and status(url, "/v1/models", KEYS) == 401
        assert [status(url, "/v1/models", key) for key in KEYS.split()] == [200, 200]

        server.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while status(url, ready) != 503:
            assert time.monotonic() < deadline, "it is still ready"
        # Not ready, yet alive and at work: load balancers need a moment to notice.
        assert status(url, live) == 200 and status(url, "/v1/models", "first-key") == 200
        assert server.wait(timeout=it.pod["terminationGracePeriodSeconds"]) == 0


# The article's container as it stands there, with its ConfigMap's values.
ARTICLE = """
-m vllm.entrypoints.openai.api_server --model Qwen/Qwen3-VL-8B-Instruct --served-model-name qwen3-vl-8b
--tensor-parallel-size 1 --gpu-memory-utilization 0.90 --dtype bfloat16 --max-model-len 8192 --max-num-seqs 128
--port 0 --host 0.0.0.0 --trust-remote-code --enable-prefix-caching
"""


def test_the_articles_own_command_is_understood(octavo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Who changes nothing but the image's name: in ours `python3` is a name of octavo."""
    python3 = tmp_path / "python3"
    python3.symlink_to(octavo)
    done = run(python3, ARTICLE.split(), {"HOME": str(tmp_path), "TOKENIZERS_PARALLELISM": "false"})
    assert done.returncode == 1 and "--trust-remote-code has no effect" in done.stderr
    assert "offline mode is on" in done.stderr, done.stderr
