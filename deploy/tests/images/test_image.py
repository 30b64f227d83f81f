"""The image for processors."""

import json
import os
import pathlib
import signal
import socket
import subprocess

import pytest

from conftest import ask, wait_until
from images import UID, files_of, size_of
from places import OCTAVO, free_port


@pytest.fixture(scope="session")
def image(images):
    """The default target."""
    return images.build()


def test_its_size_is_the_binary_and_what_it_needs(image, figure):
    kind = OCTAVO.parent.name
    figure(
        f"image: {image['size']}; the binary ({kind}, without line tables) {image['binary'] / 1e6:.1f} MB, its C library "
        f"{image['runtime'] / 1e6:.1f} MB"
    )
    rest = size_of(image["root"]) - image["binary"] - image["runtime"]
    assert 0 <= rest < 100_000, "something else is in it: " + ", ".join(map(str, files_of(image["root"])))


def test_what_it_says_of_itself(image):
    config = image["config"]
    assert config["User"] == f"{UID}:{UID}" and config["WorkingDir"] == "/workspace"
    assert "8000/tcp" in config["ExposedPorts"]
    environment = dict(variable.split("=", 1) for variable in config["Env"])
    assert environment["HOME"] == "/workspace" and environment["HF_HOME"].startswith("/workspace/")
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == "1.2.3"
    assert labels["org.opencontainers.image.revision"] == "abcdef"
    assert labels["org.opencontainers.image.licenses"] == "Apache-2.0"
    assert config["Healthcheck"]["Test"] == ["CMD", "/usr/local/bin/octavo", "health"]


def test_who_may_write_where(image):
    root = image["root"]
    workspace = (root / "workspace").stat()
    assert (workspace.st_uid, workspace.st_gid, workspace.st_mode & 0o7777) == (UID, UID, 0o775)
    ours = [root / name for name in ["usr/local/bin/octavo", "usr/share/doc/octavo/LICENSE", "opt/octavo/vllm/python3"]]
    for file in [root, *ours]:
        assert (file.lstat().st_uid, file.lstat().st_gid) == (0, 0), file
        assert file.is_symlink() or file.stat().st_mode & 0o022 == 0, file
    assert os.readlink(ours[-1]) == "/usr/local/bin/octavo"
    shells = [file for file in root.rglob("*") if file.name in {"sh", "bash", "dash", "busybox"}]
    assert not shells


SERVE = ["serve", "/models/tiny", "--served-model-name", "tiny", "--shutdown-lag", "0"]


def test_it_serves_with_a_root_that_cannot_be_written_and_ends_at_sigterm(image, container):
    # Nothing is writable, not even /workspace or /tmp.
    with container(image, "own", image["config"]["Entrypoint"] + SERVE) as octavo:
        wait_until(octavo.healthy, octavo.process)
        assert octavo.status("NSpid")[1:] == ["1"], "it is the first process: nobody forwards signals to it"
        assert octavo.status("Uid") == [str(UID)] * 4 and octavo.status("Gid") == [str(UID)] * 4
        assert octavo.status("CapEff") == ["0" * 16]
        with pytest.raises(OSError):
            (pathlib.Path(f"/proc/{octavo.pid()}/root") / "workspace" / "file").write_text("x")

        request = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        status, answer = ask(octavo.url("/v1/completions"), request)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 4, answer

        probe = octavo.execute(*image["config"]["Healthcheck"]["Test"][1:])
        assert (probe.returncode, probe.stdout) == (0, f"{octavo.url('/health')}: 200 OK\n")
        unhealthy = octavo.execute("/usr/local/bin/octavo", "health", "--port", str(free_port()))
        assert unhealthy.returncode == 1 and "connecting failed" in unhealthy.stderr

        os.kill(octavo.pid(), signal.SIGTERM)
        log = octavo.process.communicate(timeout=30)[1]
        assert octavo.process.returncode == 0, log


def test_commands_of_vllm_and_any_user_will_do(image, container):
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny", "--shutdown-lag", "0"]
    with container(image, "vllm", command, uid=1234567, gid=0) as octavo:
        wait_until(octavo.healthy, octavo.process)
        status, answer = ask(octavo.url("/v1/models"))
        assert status == 200 and json.loads(answer)["data"][0]["id"] == "/models/tiny"


@pytest.mark.parametrize(
    ("name", "command", "status"),
    [
        ("pull", ["pull", "org/name"], 128 + signal.SIGTERM),
        ("batch", ["run-batch", "--model", "org/name", "-i", "/models/batch/in.jsonl", "-o", "/workspace/out.jsonl"], 1),
        ("serve", ["serve", "org/name"], 0),
    ],
)
def test_a_download_is_ended_by_sigterm(image, container, name, command, status):
    """The kernel keeps a signal from process 1 that does not handle it."""
    with socket.socket() as hub:
        hub.bind(("127.0.0.1", 0))
        hub.listen()
        hub.settimeout(30)
        endpoint = f"http://127.0.0.1:{hub.getsockname()[1]}"
        command = image["config"]["Entrypoint"] + command
        with container(image, f"{name}-ended", command, writable=["/workspace"], HF_ENDPOINT=endpoint) as octavo:
            # It has begun to ask, and will get no answer.
            connection, _ = hub.accept()
            with connection:
                os.kill(octavo.pid(), signal.SIGTERM)
                log = octavo.process.communicate(timeout=10)[1]
        assert octavo.process.returncode == status, log


def test_a_model_that_is_not_there_is_told_and_the_cache_is_where_it_says(image, container):
    """Offline and with an empty cache, the first message must name what is missing and no Python."""
    octavo = container(image, "pull", image["config"]["Entrypoint"] + ["pull", "org/name", "--offline"], writable=["/workspace"])
    command = [*octavo.crun, "run", "--bundle", octavo.bundle, octavo.name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and "org/name" in run.stderr, run.stderr
    assert "/workspace/.cache/huggingface" in run.stderr, run.stderr
