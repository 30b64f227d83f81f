"""The images for GPUs: what the image for processors has, compiled kernels, and in one of them cuBLASLt. There is no GPU here, so
they are looked at, asked what they find, and serve on the processor if told to.

A few kernels are compiled, and cuBLASLt is a stand-in; with OCTAVO_WHOLE_IMAGES=1 it is every kernel and NVIDIA's own library."""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys

import pytest

from conftest import ask, missing, wait_until
from images import UID, check, files_of, size_of
from places import DEPLOY, OCTAVO, TARGET

WHOLE = os.environ.get("OCTAVO_WHOLE_IMAGES") == "1"
# Kernels are tuned for the chips of TUNED, and on sm_75 none of theirs spills either. On others a thread may keep so many bytes in
# memory, as kernels/tests/nvrtc/packed.rs permits.
TUNED = {"sm_70", "sm_75", "sm_89", "sm_90a"}
MOST_SPILLED = 80
CHIPS = ["compute_120", "sm_100", "sm_120", "sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90a"]
PACK = "usr/local/share/octavo/kernels"
CUBLASLT = "usr/local/cuda/lib64/libcublasLt.so.12"
DOCKERFILE = (DEPLOY / "docker" / "Dockerfile").read_text()


def nvrtc():
    """The folder of the compiler: of the package that the kernels' own tests install."""
    tools = pathlib.Path(os.environ.get("OCTAVO_CUDA_TOOLS", TARGET / "ci-venv-cuda"))
    found = sorted(tools.glob("lib/python3*/site-packages/nvidia/cuda_nvrtc/lib"))
    return found[0] if found else missing(f"NVRTC is not installed in {tools}: kernels/tests/requirements.txt brings it")


@pytest.fixture(scope="session")
def packed(images):
    """The pack in the build context, as the Dockerfile's own command makes it."""
    folder = images.context / "target" / "kernels"
    arch = re.search(r"^ARG ARCH=(.+)$", DOCKERFILE, re.M)[1]
    command = [OCTAVO, "kernels", "build", "--arch", arch, "--output", folder]
    command += [] if WHOLE else ["--only", "copy_blocks,gather_rows,sampling_draw"]
    check(*command, env={**os.environ, "OCTAVO_CUDA_LIBS": str(nvrtc())})
    return folder


@pytest.fixture(scope="session")
def slim(images, packed):
    return images.build("slim", KERNEL_PACK="target/kernels")


@pytest.fixture(scope="session")
def full(images, packed):
    folder = images.context / "target" / "cublaslt"
    folder.mkdir()
    if WHOLE:
        package = re.search(r"nvidia-cublas-cu12==[\d.]+", DOCKERFILE)[0]
        place = images.folder / "package"
        check(sys.executable, "-m", "pip", "install", "-q", "--no-cache-dir", "--no-deps", "--target", place, package)
        for file in [place / "nvidia/cublas/lib/libcublasLt.so.12", *place.glob("nvidia_cublas_cu12-*/licenses/License.txt")]:
            shutil.move(file, folder)
        shutil.rmtree(place)
    else:
        for name in ["libcublasLt.so.12", "License.txt"]:
            (folder / name).write_text(f"a stand-in for {name}")
    return images.build("full", KERNEL_PACK="target/kernels", CUBLASLT="target/cublaslt")


@pytest.fixture(params=["slim", "full"])
def image(request):
    return request.getfixturevalue(request.param)


def test_what_the_slim_one_has_is_the_processors_and_the_kernels(slim, packed, figure):
    pack = size_of(packed)
    kind = "every kernel" if WHOLE else "a few kernels"
    figure(f"image slim: {slim['size']}; {kind}: {pack / 1e6:.1f} MB in {len(files_of(packed))} files")
    rest = size_of(slim["root"]) - slim["binary"] - slim["runtime"] - pack
    assert 0 <= rest < 100_000, "something else is in it: " + ", ".join(map(str, files_of(slim["root"])))
    of_nvidia = [file for file in files_of(slim["root"]) if re.search("nvrtc|cublas|libcuda|nvcc|ptxas", file.name.lower())]
    assert not of_nvidia


def test_what_the_full_one_has_more_is_cublaslt_and_its_licence(slim, full, figure):
    figure(f"image full: {full['size']}; cuBLASLt {(full['root'] / CUBLASLT).stat().st_size / 1e6:.1f} MB")
    files = {name: {str(file.relative_to(image["root"])) for file in files_of(image["root"])} for name, image in
             [("slim", slim), ("full", full)]}
    assert files["full"] - files["slim"] == {CUBLASLT, "usr/share/doc/cublaslt/License.txt"}
    assert not files["slim"] - files["full"]


def test_the_pack_is_for_every_chip_and_nobody_can_write_it(image):
    folder = image["root"] / PACK
    index = json.loads((folder / "pack.json").read_text())
    assert list(index["chips"]) == CHIPS
    assert {part["nvrtc"] for part in index["chips"].values()} == {"12.9"}
    kernels = {arch: len(list(folder.glob(f"{arch}-*.*"))) for arch in CHIPS}
    assert kernels == {arch: part["kernels"] for arch, part in index["chips"].items()}
    assert sum(kernels.values()) > (450 if WHOLE else 8)
    for file in [folder, *folder.iterdir()]:
        status = file.stat()
        assert (status.st_uid, status.st_gid) == (0, 0) and status.st_mode & 0o022 == 0, file
        assert status.st_mode & 0o004, f"{file} cannot be read by any user"


def test_packed_kernels_spill_little_and_none_where_they_are_tuned(packed):
    usages = json.loads((packed / "usage.json").read_text())
    most = {name: 0 if name.split("-")[0] in TUNED else MOST_SPILLED for name in usages}
    spilled = [f"{name}: {usage}" for name, usage in usages.items()
               if max(usage.get("stack", 0), usage.get("spills", 0)) > most[name]]
    assert usages
    assert not spilled, "\n".join(spilled)


def test_what_it_says_of_itself(image):
    config = image["config"]
    assert config["User"] == f"{UID}:{UID}" and config["WorkingDir"] == "/workspace"
    environment = dict(variable.split("=", 1) for variable in config["Env"])
    assert environment["HOME"] == "/workspace"
    # A container without a usable GPU must not serve from the processor.
    assert environment["OCTAVO_DEVICE"] == "cuda"
    # What NVIDIA's container runtime goes by.
    assert environment["NVIDIA_VISIBLE_DEVICES"] == "all" and environment["NVIDIA_DRIVER_CAPABILITIES"] == "compute,utility"
    labels = config["Labels"]
    assert labels["org.opencontainers.image.version"] == "1.2.3" and "GPU" in labels["org.opencontainers.image.description"]
    assert config["Entrypoint"] == ["/usr/local/bin/octavo"] and config["Cmd"] == ["serve"]
    assert config["Healthcheck"]["Test"] == ["CMD", "/usr/local/bin/octavo", "health"]


def test_the_full_one_tells_the_licences_of_both(slim, full):
    licences = {name: image["config"]["Labels"]["org.opencontainers.image.licenses"] for name, image in
                [("slim", slim), ("full", full)]}
    assert licences == {"slim": "Apache-2.0", "full": "Apache-2.0 AND LicenseRef-NVIDIA-cuBLAS"}


def test_it_finds_its_kernels_and_says_that_there_is_no_gpu(request, image, container):
    octavo = container(image, f"doctor-{request.node.callspec.id}", ["/usr/local/bin/octavo", "doctor"])
    said = subprocess.run([*octavo.crun, "run", "--bundle", octavo.bundle, octavo.name], capture_output=True, text=True)
    assert said.returncode == 0, said.stderr
    assert f"/{PACK} ({', '.join(CHIPS)}; NVRTC 12.9)\n" in said.stdout, said.stdout
    assert "GPU                      none: there is no NVIDIA driver" in said.stdout


def test_it_refuses_to_serve_where_there_is_no_gpu(request, image, container):
    command = [*image["config"]["Entrypoint"], "serve", "/models/tiny"]
    octavo = container(image, f"refuse-{request.node.callspec.id}", command)
    said = subprocess.run([*octavo.crun, "run", "--bundle", octavo.bundle, octavo.name], capture_output=True, text=True)
    assert said.returncode == 1 and "--device cuda: there is no NVIDIA driver" in said.stderr, said.stderr


def test_it_serves_on_the_processor_if_told_to(request, image, container):
    command = [*image["config"]["Entrypoint"], "serve", "/models/tiny", "--served-model-name", "tiny", "--shutdown-lag", "0",
               "--device", "cpu"]
    with container(image, f"serve-{request.node.callspec.id}", command) as octavo:
        wait_until(octavo.healthy, octavo.process)
        request = {"model": "tiny", "prompt": "Once", "max_tokens": 4, "temperature": 0, "ignore_eos": True}
        status, answer = ask(octavo.url("/v1/completions"), request)
        assert status == 200 and json.loads(answer)["usage"]["completion_tokens"] == 4, answer
        os.kill(octavo.pid(), signal.SIGTERM)
        octavo.process.communicate(timeout=30)
