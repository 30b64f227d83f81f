"""The wheel and the tarball, installed where there is nothing else: no compiler, no variable, no other package."""

import contextlib
import hashlib
import json
import os
import pathlib
import re
import runpy
import subprocess
import sys
import tarfile
import time
import tomllib
import urllib.error
import urllib.request
import venv
import zipfile

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from places import DEPLOY, ROOT, TINY, free_port

VERSION = tomllib.loads((ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
# Above what is released; the goal is 15 MB.
LARGEST = 26_000_000


def only(folder, pattern):
    (found,) = folder.glob(pattern)
    return found


@pytest.fixture(scope="module")
def wheel(packages):
    return only(packages, "*.whl")


@pytest.fixture(scope="module")
def tarball(packages):
    return only(packages, "*.tar.gz")


@pytest.fixture(scope="module")
def unpacked(tarball, tmp_path_factory):
    folder = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(tarball) as archive:
        archive.extractall(folder, filter="data")
    return only(folder, "*")


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory):
    """A virtual environment with the wheel alone."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, with_pip=True)
    run(folder / "bin" / "python", "-m", "pip", "install", "--quiet", "--no-index", wheel, home=folder)
    return folder


def clean(home):
    return {"PATH": "/usr/bin:/bin", "HOME": str(home)}


def run(*command, home):
    done = subprocess.run(command, capture_output=True, text=True, env=clean(home), cwd=home)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


def ask(url, body=None):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


@contextlib.contextmanager
def serving(command, home):
    """The address of a server of the tiny model."""
    port = free_port()
    flags = ["--host", "127.0.0.1", "--port", port, "--served-model-name", "tiny", "--cpu-threads", 1]
    flags += ["--num-gpu-blocks-override", 64, "--shutdown-lag", 0]
    log = home / "serve.log"
    words = [str(word) for word in [*command, "serve", TINY, *flags]]
    with log.open("w") as file:
        server = subprocess.Popen(words, stdout=file, stderr=file, env=clean(home), cwd=home)
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + 60
        while True:
            with contextlib.suppress(urllib.error.URLError):
                ask(f"{url}/health")
                break
            assert server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.05)
        yield url
        server.terminate()
        assert server.wait(timeout=40) == 0, log.read_text()
    finally:
        server.kill()
        server.wait()


def answers(command, home):
    """Whether the server that a command starts completes a prompt."""
    with serving(command, home) as url:
        body = {"model": "tiny", "prompt": "Hello", "max_tokens": 4, "ignore_eos": True}
        answer = json.loads(ask(f"{url}/v1/completions", body))
        return answer["usage"]["completion_tokens"] == 4


# Wheel


def test_the_wheel_installs_a_command_and_a_module(environment, tmp_path):
    assert run(environment / "bin" / "octavo", "--version", home=tmp_path).startswith(f"octavo {VERSION}")
    assert run(environment / "bin" / "python", "-m", "octavo", "--version", home=tmp_path).startswith(f"octavo {VERSION}")
    help = run(environment / "bin" / "python", "-m", "octavo", "serve", "--help", home=tmp_path)
    assert "--max-model-len" in help


def test_the_module_serves(environment, tmp_path):
    assert answers([environment / "bin" / "python", "-m", "octavo"], tmp_path)


@pytest.mark.parametrize("option", ["--target", "--prefix"])
def test_the_module_finds_the_binary_in_another_folder(option, wheel, tmp_path):
    folder = tmp_path / "folder"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--ignore-installed"]
    run(*pip, option, folder, wheel, home=tmp_path)
    (package,) = {path.parent.parent for path in folder.rglob("octavo/__main__.py")}

    def version():
        command = [sys.executable, "-m", "octavo", "--version"]
        return subprocess.run(command, capture_output=True, text=True, env={"PYTHONPATH": str(package)}, cwd=tmp_path)

    assert version().stdout.startswith(f"octavo {VERSION}"), version().stderr
    (folder / "bin" / "octavo").unlink()
    assert version().returncode == 1
    assert "the octavo binary is in none of these folders" in version().stderr


def test_the_platform_tag_is_true(wheel):
    """The tag names the C library that the binary needs, as auditwheel reads it from the binary, and none that is older."""
    tag = re.fullmatch(r"octavo-[\d.]+-py3-none-manylinux_(\d+)_(\d+)_(\w+)\.whl", wheel.name)
    assert tag, wheel.name
    shown = run(sys.executable, "-m", "auditwheel", "show", wheel, home=wheel.parent)
    policy = re.search(r'platform tag:\s+"manylinux_(\d+)_(\d+)_(\w+)"', shown)
    assert policy, shown
    assert policy.groups() == tag.groups()


def test_metadata_and_licences_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (info,) = {name.split("/")[0] for name in names if ".dist-info/" in name}
        metadata = archive.read(f"{info}/METADATA").decode()
    assert f"Version: {VERSION}" in metadata
    assert "License-Expression: Apache-2.0" in metadata
    assert "Requires-Dist" not in metadata
    listed = set(re.findall(r"^License-File: (.*)$", metadata, re.M))
    assert listed == {"LICENSE", "THIRD-PARTY-LICENSES.txt", "RUST-STANDARD-LIBRARY-LICENSES.html"}
    assert {f"{info}/licenses/{name}" for name in listed} <= set(names)
    assert f"{info}/sboms/octavo.cdx.json" in names


# Tarball


def test_the_binary_of_the_tarball_serves(unpacked, tmp_path):
    assert run(unpacked / "octavo", "--version", home=tmp_path).startswith(f"octavo {VERSION}")
    assert answers([unpacked / "octavo"], tmp_path)


def test_the_tarball_has_what_belongs_to_the_binary(unpacked, tmp_path):
    files = {"octavo", "LICENSE", "README.md", "THIRD-PARTY-LICENSES.txt", "RUST-STANDARD-LIBRARY-LICENSES.html"}
    files |= {"octavo.cdx.json"}
    offered = subprocess.run([unpacked / "octavo", "completions", "--help"], capture_output=True).returncode == 0
    completions = {"completions"} if offered else set()
    assert {path.name for path in unpacked.iterdir()} == files | completions
    if offered:
        scripts = {path.name: path for path in (unpacked / "completions").iterdir()}
        assert set(scripts) == {"octavo.bash", "octavo.fish", "_octavo"}
        run("bash", "-n", scripts["octavo.bash"], home=tmp_path)
    assert "Apache License" in (unpacked / "LICENSE").read_text()


def test_wheel_and_tarball_have_the_same_binary(wheel, unpacked):
    with zipfile.ZipFile(wheel) as archive:
        binary = archive.read(f"octavo-{VERSION}.data/scripts/octavo")
    assert binary == (unpacked / "octavo").read_bytes()


def test_checksums(packages):
    lines = (packages / "SHA256SUMS").read_text().splitlines()
    sums = dict(reversed(line.split("  ", 1)) for line in lines)
    assert set(sums) == {file.name for file in packages.iterdir()} - {"SHA256SUMS"}
    for name, expected in sums.items():
        assert hashlib.sha256((packages / name).read_bytes()).hexdigest() == expected, name


# Binary


def test_debug_information_is_in_a_file_of_its_own(packages, unpacked):
    sections = run("objdump", "--section-headers", unpacked / "octavo", home=packages)
    assert ".debug_info" not in sections and ".symtab" not in sections
    assert ".gnu_debuglink" in sections
    debug = only(packages, "*.debug")
    assert ".debug_line" in run("objdump", "--section-headers", debug, home=packages)
    notes = [run("readelf", "--notes", file, home=packages) for file in [debug, unpacked / "octavo"]]
    ids = [re.findall(r"Build ID: (\w+)", note) for note in notes]
    assert ids[0] and ids[0] == ids[1]


def paths_of_this_machine(binary):
    folders = [ROOT, pathlib.Path.home(), pathlib.Path(os.environ.get("CARGO_HOME", pathlib.Path.home() / ".cargo"))]
    content = binary.read_bytes()
    return [folder for folder in folders if f"{folder}/".encode() in content]


def test_a_released_binary_is_small_and_names_no_folder_of_this_machine(unpacked, released):
    binary = unpacked / "octavo"
    if released:
        assert paths_of_this_machine(binary) == []
        assert binary.stat().st_size <= LARGEST
    else:
        # Nothing is remapped in a debug build, which shows that such a path would be found.
        assert paths_of_this_machine(binary)


# Bill of materials


def linked():
    """Names and versions of the crates that are linked, as cargo's tree has them."""
    host = re.search(r"host: (\S+)", subprocess.run(["rustc", "-vV"], capture_output=True, text=True).stdout)[1]
    command = ["cargo", "tree", "--locked", "-p", "octavo", "--target", host, "-e", "normal,no-proc-macro", "--prefix", "none"]
    tree = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=True).stdout
    return {(name, version.lstrip("v")) for name, version in (line.split()[:2] for line in tree.splitlines())}


def test_the_sbom_lists_what_is_linked(unpacked):
    text = (unpacked / "octavo.cdx.json").read_text()
    validator = JsonStrictValidator(SchemaVersion.V1_6)
    assert validator.validate_str(text) is None
    assert validator.validate_str(text.replace('"version"', '"versions"')) is not None
    bill = json.loads(text)
    root = bill["metadata"]["component"]
    crates = [part for part in bill["components"] if part["name"] != "std" and "pkg:npm" not in part.get("purl", "")]
    listed = {(part["name"], part["version"]) for part in [root, *crates]}
    assert listed == linked()
    assert not {"proptest", "candle-core", "serde_derive"} & {name for name, _ in listed}
    for part in bill["components"]:
        assert part["licenses"], part
        if "purl" in part:
            assert part["hashes"], part
    known = {root["bom-ref"]} | {part["bom-ref"] for part in bill["components"]}
    assert {edge["ref"] for edge in bill["dependencies"]} == known
    assert str(ROOT) not in text


def test_every_linked_crate_has_its_licence(unpacked):
    text = (unpacked / "THIRD-PARTY-LICENSES.txt").read_text()
    listed, licences = text.split("=" * 80, 1)
    ours = {name for name, _ in linked() if name == "octavo" or name.startswith("octavo-")}
    for name, version in linked():
        if name not in ours:
            assert re.search(rf"^{re.escape(name)} {re.escape(version)}: \S", listed, re.M), name
            assert re.search(rf"(^|, ){re.escape(name)} {re.escape(version)}(,|$)", licences, re.M), name
    # Each has a text of its own, whose conditions are these words.
    assert "Permission is hereby granted, free of charge" in licences
    assert "Redistributions in binary form must reproduce" in licences


def test_embedded_files_of_other_projects_are_read_from_their_table(tmp_path):
    vendor = tmp_path / "crates" / "page" / "vendor"
    vendor.mkdir(parents=True)
    (vendor / "shiny.LICENSE.txt").write_text("Use it.\n")
    (vendor / "README.md").write_text(
        "# Libraries\n\n| file | npm package | version | licence | SHA-256 |\n|---|---|---|---|---|\n"
        "| `shiny.js` | `@scope/shiny` | 1.2.3 | MIT, `shiny.LICENSE.txt` | `00ff` |\n"
    )
    bill = runpy.run_path(DEPLOY / "release" / "bill.py")
    (file,) = bill["vendored"](tmp_path)
    assert (file.name, file.version, file.expression, file.text) == ("@scope/shiny", "1.2.3", "MIT", "Use it.")
    part = bill["vendored_component"](file)
    assert str(part.purl) == "pkg:npm/%40scope/shiny@1.2.3"
