"""The real server, started as the renderings start it: takes their flags, answers their probes, drains as they ask."""

import contextlib
import http.client
import json
import pathlib
import re
import signal
import socket
import ssl
import subprocess
import time

import pytest
import trustme
import yaml

import render
from manifests import Manifests, Workload, at, environment
from places import OCTAVO, TINY, free_port
from processes import get
from serving import Server, started

RENDERINGS = [f"kustomize {name}" for name in render.KUSTOMIZATIONS] + [f"helm {name}" for name in render.CHARTS]
KEYS = "first-key second-key"
TLS_FOLDER, KEYS_FOLDER = "/etc/octavo-tls", "/etc/octavo-keys"


def certificate(folder: pathlib.Path) -> None:
    """What the secret octavo-pod-tls holds, as files."""
    folder.mkdir(exist_ok=True)
    authority = trustme.CA()
    issued = authority.issue_cert("octavo")
    authority.cert_pem.write_to_path(folder / "ca.crt")
    issued.private_key_pem.write_to_path(folder / "tls.key")
    (folder / "tls.crt").write_bytes(b"".join(blob.bytes() for blob in issued.cert_chain_pems))


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
    return {name: referred(value, found) for name, value in found.items()}


def referred(text: str, given: dict[str, str]) -> str:
    """A text with the values of the variables that it refers to."""
    for name, value in given.items():
        text = text.replace(f"$({name})", value)
    return text


def prepared(m: Manifests, it: Workload, folder: pathlib.Path) -> tuple[list[str], dict[str, str]]:
    """Arguments and environment of a workload's container, on a free port and with its configuration in `folder`."""
    container = it.pod["containers"][0]
    assert "command" not in container, "the image's entry point is octavo"
    given = variables(m, container) | {"HOME": str(folder), "HF_HOME": str(folder)}
    # No GPU is here.
    given["OCTAVO_DEVICE"] = "cpu"
    for config in m.of("ConfigMap"):
        (folder / "config.yaml").write_text(config["data"].get("config.yaml", "{}"))
    if TLS_FOLDER in str(given):
        certificate(folder / "tls")
        given = {name: value.replace(TLS_FOLDER, str(folder / "tls")) for name, value in given.items()}
    if KEYS_FOLDER in str(given):
        (folder / "keys").mkdir(exist_ok=True)
        (folder / "keys" / "keys.yaml").write_text("- name: a\n  key: third-key\n")
        given = {name: value.replace(KEYS_FOLDER, str(folder / "keys")) for name, value in given.items()}
    arguments = []
    for word in container["args"]:
        word = referred(word, given)
        arguments.append(word.replace("/etc/octavo", str(folder)).replace("--port=8000", "--port=0"))
    if "--port" in arguments:
        arguments[arguments.index("--port") + 1] = "0"
    return arguments, given


def run(octavo: pathlib.Path, arguments: list[str], given: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Starts it where there is no model, so that a command line that is understood ends there."""
    given = {"HF_HUB_OFFLINE": "1", **given}
    return subprocess.run([octavo, *arguments], env=given, capture_output=True, text=True, timeout=30)


def ends_at_the_model(done: subprocess.CompletedProcess[str]) -> bool:
    """Whether the command line was understood, and the model alone is missing."""
    return done.returncode == 1 and "offline mode is on" in done.stderr


@pytest.mark.parametrize("name", RENDERINGS)
def test_command_lines_are_understood(
    name: str, renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    m = renderings[name]
    for it in m.workloads:
        done = run(octavo, *prepared(m, it, tmp_path))
        assert ends_at_the_model(done), done.stderr


def test_command_lines_that_are_not_understood_are_noticed(
    renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    m = renderings["kustomize production"]
    arguments, given = prepared(m, m.servers[0], tmp_path)
    assert run(octavo, [*arguments, "--no-such-flag"], given).returncode == 2
    assert run(octavo, arguments, {**given, "OCTAVO_DTYPE": "decimal"}).returncode == 2
    (tmp_path / "config.yaml").write_text("max-model-length: 8192\n")
    assert run(octavo, arguments, given).returncode == 2


def test_an_empty_secret_opens_no_server(
    renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    m = renderings["kustomize production"]
    arguments, given = prepared(m, m.servers[0], tmp_path)
    for key in ("", " "):
        done = run(octavo, arguments, {**given, "OCTAVO_API_KEY": key})
        assert done.returncode == 1 and "is set but empty" in done.stderr, done.stderr


def status(server: Server, path: str, key: str | None = None, context: ssl.SSLContext | None = None) -> int:
    """What a path is answered; over TLS, by a server that `context` takes for octavo's."""
    connection = (
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=5)
        if context is None
        else Named("octavo", server.port, timeout=5, context=context)
    )
    try:
        connection.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})
        return connection.getresponse().status
    finally:
        connection.close()


class Named(http.client.HTTPSConnection):
    """A connection to this machine that asks for the certificate of another name, as a proxy does of a pod."""

    def connect(self) -> None:
        plain = socket.create_connection(("127.0.0.1", self.port), self.timeout)
        self.sock = self._context.wrap_socket(plain, server_hostname=self.host)


def serving(
    m: Manifests, folder: pathlib.Path, ports: dict[str, str] | None = None
) -> contextlib.AbstractContextManager[Server]:
    """The server of a rendering. All that is not the rendering's: a model that is there, a context that it has, and other
    `ports` of KV events."""
    arguments, given = prepared(m, m.servers[0], folder)
    for port, other in (ports or {}).items():
        given["OCTAVO_KV_EVENTS_CONFIG"] = given["OCTAVO_KV_EVENTS_CONFIG"].replace(f":{port}", f":{other}")
    config = yaml.safe_load((folder / "config.yaml").read_text())
    (folder / "config.yaml").write_text(yaml.safe_dump(config | {"max-model-len": 256}))
    return started([OCTAVO, *arguments], **{**given, "OCTAVO_MODEL": str(TINY)})


def probed(m: Manifests) -> list[str]:
    """The paths of startup, readiness and liveness."""
    container = m.servers[0].pod["containers"][0]
    return [container[f"{probe}Probe"]["httpGet"]["path"] for probe in ("startup", "readiness", "liveness")]


def test_probes_keys_and_drain(renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As a kubelet and a load balancer see the server of `production`."""
    m = renderings["kustomize production"]
    startup, ready, live = probed(m)
    with serving(m, tmp_path) as server:
        assert [status(server, path) for path in (startup, ready, live, "/metrics")] == [200] * 4
        # The alert OctavoGpuUnused asks for this label.
        assert re.search(r'^octavo_build_info\{.*backend="cpu"', get(f"{server.url}/metrics")[1], re.MULTILINE)
        assert status(server, "/v1/models") == 401 and status(server, "/v1/models", KEYS) == 401
        assert [status(server, "/v1/models", key) for key in KEYS.split()] == [200, 200]

        server.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + 5
        while status(server, ready) != 503:
            assert time.monotonic() < deadline, "it is still ready"
        # Not ready, yet alive and at work: load balancers need a moment to notice.
        assert status(server, live) == 200 and status(server, "/v1/models", "first-key") == 200
        assert server.process.wait(timeout=m.servers[0].pod["terminationGracePeriodSeconds"]) == 0


def test_pods_speak_tls(renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """As kubelet, Prometheus and gateway see the server of `encrypted`."""
    m = renderings["helm encrypted"]
    # The kubelet checks nothing, the others know who signs, and the name.
    kubelet = ssl._create_unverified_context()
    name = m.find("BackendTLSPolicy", "octavo")["spec"]["validation"]["hostname"]
    assert name == "octavo" == at(m.find("ServiceMonitor", "octavo"), "spec", "endpoints", 0, "tlsConfig", "serverName")
    with serving(m, tmp_path) as server:
        assert server.url.startswith("https://")
        assert [status(server, path, context=kubelet) for path in probed(m)] == [200] * 3
        gateway = ssl.create_default_context(cafile=tmp_path / "tls" / "ca.crt")
        assert status(server, "/metrics", context=gateway) == 200
        assert status(server, "/v1/models", "first-key", context=gateway) == 200
        # Whoever speaks plain HTTP all the same is told so.
        assert status(server, "/health") == 400
        with pytest.raises(ssl.SSLCertVerificationError):
            status(server, "/health", context=ssl.create_default_context())


def test_a_picker_can_follow_the_kv_events(
    renderings: dict[str, Manifests], octavo: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    """What the pods of `multi-node` publish is what endpoint-picker.yaml expects."""
    m = renderings["helm multi-node"]
    values = yaml.safe_load((render.ADDONS / "endpoint-picker.yaml").read_text())
    (config,) = map(yaml.safe_load, values["router"]["epp"]["pluginsCustomConfig"].values())
    plugins = {it["type"]: it.get("parameters", {}) for it in config["plugins"]}
    producer, tokens = plugins["precise-prefix-cache-producer"], plugins["token-producer"]
    events = producer["kvEventsConfig"]
    # On ports that are free here.
    ports = {"5557": str(free_port()), "5558": str(free_port())}
    assert events["podDiscoveryConfig"] == {"socketPort": 5557, "replaySocketPort": 5558}
    with serving(m, tmp_path, ports) as server:
        (source,) = json.loads(get(f"{server.url}/kv_event_sources")[1])
        served = json.loads(get(f"{server.url}/v1/models")[1])["data"][0]["id"]
        routes = json.loads(get(f"{server.url}/openapi.json")[1])["paths"].keys()
    assert source["endpoint"] == f"tcp://127.0.0.1:{ports['5557']}"
    assert source["replay_endpoint"] == f"tcp://127.0.0.1:{ports['5558']}"
    # The pod's address, which is x here, and the port and the name that requests are sent with.
    assert source["topic"] == f"kv@x:8000@{served}" and source["topic"].startswith(events["topicFilter"])
    assert source["block_size"] == producer["tokenProcessorConfig"]["blockSize"]
    # The Service renders a prompt's tokens for the picker, by the name of the model.
    assert routes >= {"/v1/completions/render", "/v1/chat/completions/render"}
    (service,) = m.of("Service")
    place = f"{service['metadata']['name']}.{service['metadata']['namespace']}.svc:{service['spec']['ports'][0]['port']}"
    assert tokens == {"modelName": served, "vllm": {"url": f"http://{place}"}}


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
    assert "--trust-remote-code has no effect" in done.stderr
    assert ends_at_the_model(done), done.stderr
