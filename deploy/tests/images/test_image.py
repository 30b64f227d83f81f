"""The image for processors: built by buildah from a binary that is there, run by crun as the strictest platform would:
another user, no capability, a root file system that cannot be written, no shell.

Its parts from elsewhere are replaced, because there may be no registry: the image that builds by a busybox, the one that
runs by the libraries that the binary is linked against, which is what the distroless one consists of."""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess

import pytest

from conftest import SMALL, ask, missing, tool, wait_until
from places import DEPLOY, OCTAVO, ROOT, TINY, free_port

UID = 42420
APPLETS = ["sh", "mkdir", "cp", "chmod", "ln"]


def check(*command, **options):
    run = subprocess.run(command, capture_output=True, text=True, **options)
    assert run.returncode == 0, f"{command}:\n{run.stdout}{run.stderr}"
    return run.stdout


class Buildah:
    """buildah with a storage of its own, which the test's folder takes along."""

    def __init__(self, folder):
        self.command = [tool("buildah"), "--root", folder / "storage", "--runroot", folder / "run"]
        self.command += ["--storage-driver", "vfs"]

    def __call__(self, *arguments):
        return check(*self.command, *arguments, env={**os.environ, "BUILDAH_ISOLATION": "chroot"}).strip()

    def base(self, name, files):
        """An image of a folder's files."""
        dockerfile = files.with_suffix(".Dockerfile")
        dockerfile.write_text("FROM scratch\nCOPY . /\n")
        self("bud", "--quiet", "--file", dockerfile, "--tag", f"localhost/{name}", files)
        return f"localhost/{name}"


def builder(folder):
    """A shell and the few commands that the Dockerfile runs."""
    files = folder / "builder"
    (files / "bin").mkdir(parents=True)
    (files / "tmp").mkdir()
    busybox = tool("busybox")
    if subprocess.run(["ldd", busybox], capture_output=True).returncode == 0:
        missing("busybox is not linked statically (Debian's busybox-static is)")
    shutil.copy(busybox, files / "bin" / "busybox")
    for applet in APPLETS:
        (files / "bin" / applet).symlink_to("busybox")
    return files


def libraries(folder):
    files = folder / "libraries"
    found = re.findall(r"(/\S+) \(0x", check("ldd", OCTAVO))
    assert found, "the binary is linked dynamically"
    for library in map(pathlib.Path, found):
        copy = files / library.relative_to("/")
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, copy)
    return files


@pytest.fixture(scope="session")
def image(tmp_path_factory):
    """The configuration of the image, and its root file system."""
    folder = tmp_path_factory.mktemp("image")
    context = folder / "context"
    binary = context / "target" / "release" / "octavo"
    binary.parent.mkdir(parents=True)
    # As the Dockerfile's own build has it: without tables of lines, with names.
    check(tool("strip"), "--strip-debug", "-o", binary, OCTAVO)
    for name in ["LICENSE", ".dockerignore"]:
        shutil.copy(ROOT / name, context)
    buildah = Buildah(folder)
    arguments = {
        "BUILD_IMAGE": buildah.base("builder", builder(folder)),
        "RUNTIME_IMAGE": buildah.base("runtime", libraries(folder)),
        "BINARY": "target/release/octavo",
        "VERSION": "1.2.3",
        "REVISION": "abcdef",
    }
    given = [word for item in arguments.items() for word in ("--build-arg", "=".join(item))]
    dockerfile = DEPLOY / "docker" / "Dockerfile"
    # OCI images have no health check; Docker's have.
    buildah("bud", "--quiet", "--format", "docker", "--file", dockerfile, *given, "--tag", "localhost/octavo", context)
    described = json.loads(buildah("inspect", "--type", "image", "localhost/octavo"))
    container = buildah("from", "--pull-never", "localhost/octavo")
    size = json.loads(buildah("images", "--json", "localhost/octavo"))[0]["size"]
    yield {
        "config": described["Docker"]["config"],
        "root": pathlib.Path(buildah("mount", container)),
        "size": size,
        "binary": binary.stat().st_size,
        "runtime": sum(file.stat().st_size for file in (folder / "libraries").rglob("*") if file.is_file()),
        "folder": folder,
    }
    buildah("umount", container)
    shutil.rmtree(folder)


def test_its_size_is_the_binary_and_what_it_needs(image, figure):
    kind = "debug" if "debug" in OCTAVO.parts else "release"
    figure(
        f"image: {image['size']}; the binary ({kind}, without line tables) {image['binary'] / 1e6:.1f} MB, its C library "
        f"{image['runtime'] / 1e6:.1f} MB"
    )
    files = [file for file in image["root"].rglob("*") if file.is_file() and not file.is_symlink()]
    size = sum(file.stat().st_size for file in files)
    rest = size - image["binary"] - image["runtime"]
    assert 0 <= rest < 100_000, "something else is in it: " + ", ".join(map(str, files))


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


class Container:
    """A container of the image, with the network of the host. Its main process is number 1 of its own."""

    def __init__(self, image, name, command, uid, gid, writable, variables):
        self.bundle = image["folder"] / name
        self.bundle.mkdir()
        self.name = f"octavo-{os.getpid()}-{name}"
        # crun refuses some layouts of control groups, which nothing here needs: it sees none.
        hidden = 'mount -t tmpfs none /sys/fs/cgroup && exec "$@"'
        self.crun = [tool("unshare"), "--mount", "sh", "-c", hidden, "sh", tool("crun")]
        self.crun += ["--root", image["folder"] / "crun", "--cgroup-manager", "disabled"]
        self.port = free_port()
        config = image["config"]
        environment = config["Env"] + [f"{key}={value}" for key, value in {**SMALL, "OCTAVO_PORT": self.port, **variables}.items()]
        mounts = [("proc", "proc", "/proc", []), ("tmpfs", "tmpfs", "/dev", ["mode=0755"])]
        batch = image["folder"] / "batch"
        batch.mkdir(exist_ok=True)
        (batch / "in.jsonl").write_text('{"custom_id": "1", "method": "POST", "url": "/v1/completions", "body": {}}\n')
        mounts += [("bind", TINY, "/models/tiny", ["bind", "ro"]), ("bind", batch, "/models/batch", ["bind", "ro"])]
        mounts += [("tmpfs", "tmpfs", path, [f"uid={uid}", f"gid={gid}", "mode=0775"]) for path in writable]
        spec = {
            "ociVersion": "1.0.0",
            "root": {"path": str(image["root"]), "readonly": True},
            "process": {
                "user": {"uid": uid, "gid": gid},
                "args": command,
                "env": environment,
                "cwd": config["WorkingDir"],
                "noNewPrivileges": True,
                "capabilities": {},
            },
            "mounts": [dict(zip(["type", "source", "destination", "options"], map(plain, mount))) for mount in mounts],
            "linux": {"namespaces": [{"type": "pid"}, {"type": "mount"}, {"type": "ipc"}, {"type": "uts"}]},
        }
        (self.bundle / "config.json").write_text(json.dumps(spec))

    def __enter__(self):
        command = [*self.crun, "run", "--bundle", self.bundle, self.name]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        return self

    def __exit__(self, *_):
        subprocess.run([*self.crun, "delete", "--force", self.name], capture_output=True)
        self.process.kill()
        self.process.wait()

    def healthy(self):
        return self.execute("/usr/local/bin/octavo", "health").returncode == 0

    def execute(self, *command):
        return subprocess.run([*self.crun, "exec", self.name, *command], capture_output=True, text=True)

    def pid(self):
        return json.loads(check(*self.crun, "state", self.name))["pid"]

    def status(self, field):
        text = pathlib.Path(f"/proc/{self.pid()}/status").read_text()
        return re.search(rf"^{field}:\s+(.*)$", text, re.M)[1].split()

    def url(self, path):
        return f"http://127.0.0.1:{self.port}{path}"


def plain(value):
    return str(value) if isinstance(value, pathlib.Path) else value


@pytest.fixture
def container(image):
    if os.geteuid() != 0:
        missing("containers are run as root here")

    def start(name, command, uid=UID, gid=UID, writable=(), **variables):
        return Container(image, name, command, uid, gid, writable, variables)

    return start


SERVE = ["serve", "/models/tiny", "--served-model-name", "tiny", "--shutdown-lag", "0"]


def test_it_serves_with_a_root_that_cannot_be_written_and_ends_at_sigterm(image, container):
    # Nothing is writable, not even /workspace or /tmp.
    with container("own", image["config"]["Entrypoint"] + SERVE) as octavo:
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


def test_commands_of_vllm_and_any_user_will_do(container):
    command = ["python3", "-m", "vllm.entrypoints.openai.api_server", "--model", "/models/tiny", "--shutdown-lag", "0"]
    with container("vllm", command, uid=1234567, gid=0) as octavo:
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
        with container(f"{name}-ended", command, writable=["/workspace"], HF_ENDPOINT=endpoint) as octavo:
            # It has begun to ask, and will get no answer.
            connection, _ = hub.accept()
            with connection:
                os.kill(octavo.pid(), signal.SIGTERM)
                log = octavo.process.communicate(timeout=10)[1]
        assert octavo.process.returncode == status, log


def test_a_model_that_is_not_there_is_told_and_the_cache_is_where_it_says(image, container):
    """Offline and with an empty cache, the first message must name what is missing and no Python."""
    octavo = container("pull", image["config"]["Entrypoint"] + ["pull", "org/name", "--offline"], writable=["/workspace"])
    command = [*octavo.crun, "run", "--bundle", octavo.bundle, octavo.name]
    run = subprocess.run(command, capture_output=True, text=True, timeout=30)
    assert run.returncode == 1 and "org/name" in run.stderr, run.stderr
    assert "/workspace/.cache/huggingface" in run.stderr, run.stderr
