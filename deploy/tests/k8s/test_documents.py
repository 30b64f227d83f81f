"""The documents name what is there."""

import re
import shlex
import tomllib

import yaml

import render
from manifests import Manifests

PAGES = [render.DEPLOY / page for page in ("README.md", "k8s/README.md", "helm/octavo/README.md", "ovh/mks.md")]


def commands(page: render.pathlib.Path) -> list[str]:
    """The lines of a page's shell blocks, continued ones joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def test_every_component_and_overlay_is_described() -> None:
    text = (render.DEPLOY / "k8s" / "README.md").read_text()
    rows = [set(re.findall(r"`([a-z0-9-]+)`", row.split("|")[1])) for row in text.splitlines() if row.startswith("| `")]
    assert set().union(*rows) == {folder.name for folder in render.COMPONENTS.iterdir()}
    overlays = {folder.name for folder in (render.DEPLOY / "k8s" / "overlays").iterdir()}
    assert set(re.findall(r"\(overlays/([a-z-]+)\)", text)) == overlays


def test_files_of_commands_are_there() -> None:
    named = {word for page in PAGES for line in commands(page) for word in shlex.split(line, comments=True)}
    files = {word for word in named if re.fullmatch(r"deploy/(k8s|helm|tests/(k8s|requirements-k8s))[\w./-]*", word)}
    assert len(files) >= 5
    for path in files:
        assert (render.ROOT / path).exists(), path


def test_chart_takes_the_values_of_commands() -> None:
    installs = [line for page in PAGES for line in commands(page) if line.startswith("helm install octavo deploy/")]
    assert len(installs) == 2
    for line in installs:
        words = shlex.split(line)
        values = [render.ROOT / word if word.startswith("deploy/") else word for word in words[4:]]
        values = [word for word in values if word != "--create-namespace"]
        done = render.template(*values)
        assert done.returncode == 0, done.stderr


def test_versions_are_the_workspaces(renderings: dict[str, Manifests]) -> None:
    version = tomllib.loads((render.ROOT / "Cargo.toml").read_text())["workspace"]["package"]["version"]
    chart = yaml.safe_load((render.CHART / "Chart.yaml").read_text())
    assert chart["version"] == chart["appVersion"] == version
    images = {container["image"] for m in renderings.values() for it in m.workloads for container in it.containers}
    assert images and {image.rpartition(":")[2].removesuffix("-cpu") for image in images} == {version}
