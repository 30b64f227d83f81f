"""Images as the Dockerfile makes them, built by buildah from a binary that is there, and containers of them, run by crun as the
strictest platform would: another user, no capability, a root file system that cannot be written, no shell.

What images are made from elsewhere is replaced, because there may be no registry: the image that builds by a busybox, the one
that runs by the libraries that the binary is linked against, which is what the distroless one consists of."""

import json
import os
import pathlib
import re
import shutil
import subprocess

from conftest import SMALL, missing, tool
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


class Images:
    """Images of one binary, by target."""

    def __init__(self, folder):
        self.folder = folder
        self.context = folder / "context"
        self.binary = self.context / "target" / "dist" / "octavo"
        self.binary.parent.mkdir(parents=True)
        # As the Dockerfile's own build has it: without tables of lines, with names.
        check(tool("strip"), "--strip-debug", "-o", self.binary, OCTAVO)
        for name in ["LICENSE", ".dockerignore"]:
            shutil.copy(ROOT / name, self.context)
        self.buildah = Buildah(folder)
        self.libraries = libraries(folder)
        self.arguments = {
            "BUILD_IMAGE": self.buildah.base("builder", builder(folder)),
            "RUNTIME_IMAGE": self.buildah.base("runtime", self.libraries),
            "BINARY": "target/dist/octavo",
            "VERSION": "1.2.3",
            "REVISION": "abcdef",
        }
        self.containers = []

    def build(self, target=None, **arguments):
        """The configuration of an image, its root file system, and sizes."""
        given = [word for item in {**self.arguments, **arguments}.items() for word in ("--build-arg", "=".join(item))]
        given += ["--target", target] if target else []
        name = f"localhost/octavo-{target or 'default'}"
        dockerfile = DEPLOY / "docker" / "Dockerfile"
        # OCI images have no health check; Docker's have.
        self.buildah("bud", "--quiet", "--format", "docker", "--file", dockerfile, *given, "--tag", name, self.context)
        container = self.buildah("from", "--pull-never", name)
        self.containers.append(container)
        return {
            "config": json.loads(self.buildah("inspect", "--type", "image", name))["Docker"]["config"],
            "root": pathlib.Path(self.buildah("mount", container)),
            "size": json.loads(self.buildah("images", "--json", name))[0]["size"],
            "binary": self.binary.stat().st_size,
            "runtime": size_of(self.libraries),
            "folder": self.folder,
        }

    def remove(self):
        for container in self.containers:
            self.buildah("umount", container)
        shutil.rmtree(self.folder)


def files_of(root):
    return [file for file in root.rglob("*") if file.is_file() and not file.is_symlink()]


def size_of(root):
    return sum(file.stat().st_size for file in files_of(root))


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
