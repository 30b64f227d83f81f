"""The tools, the renderings, and what the server says of itself."""

import json
import pathlib
import re
import subprocess
import sys
import urllib.request

import pytest
import yaml

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import render  # noqa: E402
import tools  # noqa: E402
from lint import World  # noqa: E402
from manifests import Manifests, parse  # noqa: E402
from places import OCTAVO  # noqa: E402
from serving import serving  # noqa: E402


@pytest.fixture(scope="session", autouse=True)
def installed() -> None:
    tools.install()


@pytest.fixture(scope="session")
def octavo() -> pathlib.Path:
    if not OCTAVO.exists():
        pytest.fail(f"{OCTAVO} is not there: build it, or name another one by OCTAVO_BIN")
    return OCTAVO


@pytest.fixture(scope="session")
def kustomized(installed: None) -> dict[str, str]:
    """Every kustomization, rendered."""
    return {name: render.kustomize(folder) for name, folder in render.KUSTOMIZATIONS.items()}


@pytest.fixture(scope="session")
def charts(installed: None) -> dict[str, str]:
    """The chart with each set of values, rendered."""
    return {name: render.helm(values) for name, values in render.CHARTS.items()}


@pytest.fixture(scope="session")
def renderings(kustomized: dict[str, str], charts: dict[str, str]) -> dict[str, Manifests]:
    """All of them, by the name of the tool and their own."""
    named = {f"kustomize {name}": text for name, text in kustomized.items()}
    named |= {f"helm {name}": text for name, text in charts.items()}
    return {name: render.manifests(text) for name, text in named.items()}


@pytest.fixture(scope="session")
def world(octavo: pathlib.Path) -> World:
    """What a running server has, and what operators are told to make."""
    with serving() as server:
        with urllib.request.urlopen(f"{server.url}/openapi.json") as answer:
            routes = json.load(answer)["paths"]
        with urllib.request.urlopen(f"{server.url}/metrics") as answer:
            metrics = re.findall(r"^# TYPE (\S+)", answer.read().decode(), re.MULTILINE)
    usage = subprocess.run([octavo, "serve", "--help"], capture_output=True, text=True, check=True).stdout
    given: dict[tuple[str, str], set[str]] = {}
    for path in render.DEPLOY.glob("k8s/**/secrets.example.yaml"):
        objects = parse(path.read_text())
        given |= {(it["kind"], it["metadata"]["name"]): set(it.get("stringData", it.get("data"))) for it in objects}
    values = yaml.safe_load((render.ADDONS / "prometheus-adapter-values.yaml").read_text())
    adapter = {}
    for series in values["rules"]["custom"]:
        found = re.match(r"[\w:]+", series["seriesQuery"])
        assert found is not None
        assert re.fullmatch(series["name"]["matches"], found.group()) and found.group() in series["metricsQuery"]
        adapter[series["name"]["as"]] = found.group()
    return World(frozenset(routes), frozenset(metrics), usage, given, adapter)
