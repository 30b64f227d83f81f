"""The documents name what is there: files, headings, values, flags."""

import re
import shlex
import subprocess
import tomllib

import pytest
import yaml

import render
from manifests import Manifests

EVERY_PAGE = sorted(path for path in render.DEPLOY.rglob("*.md") if "golden" not in path.parts)
# Of other programs, by whose name they stand in the text.
FOREIGN_FLAGS = {"--build-arg", "--env", "--export", "--gres", "--probe-path", "--requeue", "--runbooks", "--set", "--target"}
FOREIGN_FLAGS |= {"--trust-remote-code", "--authorization-mode", "--force-conflicts"}
SUBCOMMANDS = ("serve", "run-batch", "health", "pull", "doctor", "kernels build")
PAGES = [render.DEPLOY / page for page in ("README.md", "k8s/README.md", "helm/octavo/README.md", "ovh/mks.md")]


def commands(page: render.pathlib.Path) -> list[str]:
    """The lines of a page's shell blocks, continued ones joined."""
    blocks = re.findall(r"```sh\n(.*?)```", page.read_text(), re.DOTALL)
    return [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]


def headings(page: render.pathlib.Path) -> set[str]:
    """What links to the headings of a page end in."""
    found = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in found}


def dead_links(page: render.pathlib.Path, text: str) -> list[str]:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        path, _, heading = link.partition("#")
        if re.match(r"[a-z]+:", link):
            continue
        target = (page.parent / path).resolve() if path else page
        if not target.exists() or heading and heading not in headings(target):
            dead.append(link)
    return dead


def test_links_lead_somewhere() -> None:
    assert len(EVERY_PAGE) > 40
    assert {page.name: dead for page in EVERY_PAGE if (dead := dead_links(page, page.read_text()))} == {}
    page = render.DEPLOY / "README.md"
    assert dead_links(page, "[a](k8s/README.md#tls) [b](gone.md) [c](#gone) [d](https://x)") == ["gone.md", "#gone"]


def named_files(text: str) -> set[str]:
    return set(re.findall(r"(?<![\w/.-])deploy/[\w./-]*\w", text))


@pytest.mark.parametrize("kind", ["*.md", "*.yaml", "*.tpl", "*.txt", "*.py"])
def test_files_that_are_named_exist(kind: str) -> None:
    files = [path for path in render.DEPLOY.rglob(kind) if path != render.pathlib.Path(__file__)]
    missing = {(path.name, name) for path in files for name in named_files(path.read_text())}
    assert files and {(at, name) for at, name in missing if not (render.ROOT / name).exists()} == set()


def test_flags_that_are_named_exist(octavo: render.pathlib.Path) -> None:
    """Those in the running text; whole commands are read by deploy/tests/images."""
    helps = [subprocess.run([octavo, *words.split(), "--help"], capture_output=True, text=True) for words in SUBCOMMANDS]
    known = {flag for done in helps for flag in re.findall(r"--[a-z][a-z0-9-]+", done.stdout)}
    named = {(page.name, flag) for page in EVERY_PAGE for flag in re.findall(r"`(--[a-z][\w-]+)", page.read_text())}
    assert len({flag for _, flag in named}) > 20
    assert {(page, flag) for page, flag in named if flag not in known | FOREIGN_FLAGS} == set()


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
