"""What is written by programs is what they write, and Grafana's own model of a dashboard loses nothing of it."""

import json
import re
import subprocess
import sys

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models.dashboard import Dashboard

from places import MONITORING, ROOT

GENERATOR = MONITORING / "dashboards" / "generate.py"
BOARDS = sorted((MONITORING / "dashboards").glob("*.json"))


def run(*command):
    return subprocess.run([sys.executable, *map(str, command)], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("program", [GENERATOR, MONITORING / "render.py"], ids=lambda path: path.name)
def test_the_files_are_what_the_program_writes(program):
    result = run(program, "--check")
    assert result.returncode == 0, result.stderr


def test_the_rendered_rules_are_the_rules():
    rendered = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())["spec"]["groups"]
    plain = [yaml.safe_load((MONITORING / name).read_text())["groups"] for name in ("recording.yaml", "alerts.yaml")]
    assert rendered == plain[0] + plain[1]


def test_runbooks_can_be_elsewhere():
    text = run(MONITORING / "render.py", "--runbooks", "https://wiki.example/octavo/").stdout
    links = re.findall(r"runbook_url: (.*)", text)
    assert len(links) > 20 and all(link.startswith("https://wiki.example/octavo/") for link in links)


def test_every_alert_is_complete():
    groups = yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]
    alerts = [rule for group in groups for rule in group["rules"]]
    assert len({alert["alert"] for alert in alerts}) == len(alerts)
    for alert in alerts:
        assert alert["labels"]["severity"] in ("critical", "warning", "info")
        assert set(alert["annotations"]) == {"summary", "description", "runbook_url"}
        assert (ROOT / alert["annotations"]["runbook_url"]).is_file()
    pages = {page.stem for page in (ROOT / "deploy" / "runbooks").glob("*.md")}
    assert pages == {alert["alert"] for alert in alerts}


def pruned(value):
    """Without what Grafana's model writes or drops because it is the default."""
    if isinstance(value, dict):
        return {key: kept for key, item in value.items() if (kept := pruned(item)) not in (None, "", [], {}, False)}
    if isinstance(value, list):
        return [pruned(item) for item in value]
    return value


def lost(ours, theirs, path=""):
    """Paths of ours that are not in theirs."""
    if isinstance(ours, dict) and isinstance(theirs, dict):
        for key, item in ours.items():
            yield from lost(item, theirs[key], f"{path}.{key}") if key in theirs else [f"{path}.{key}"]
    elif isinstance(ours, list) and isinstance(theirs, list) and len(ours) == len(theirs):
        for index, (mine, other) in enumerate(zip(ours, theirs)):
            yield from lost(mine, other, f"{path}[{index}]")
    elif ours != theirs:
        yield f"{path}: {ours!r} != {theirs!r}"


def through_grafana(board):
    return json.loads(JSONEncoder(sort_keys=True).encode(Dashboard.from_json(board)))


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_grafana_knows_every_field(path):
    board = json.loads(path.read_text())
    assert list(lost(pruned(board), pruned(through_grafana(board)))) == []
    board["panels"][1]["titel"] = "a misspelt field"
    assert list(lost(pruned(board), pruned(through_grafana(board)))) == [".panels[1].titel"]


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_panels_do_not_overlap(path):
    taken = set()
    panels = json.loads(path.read_text())["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken and place["x"] + place["w"] <= 24
        taken |= cells


@pytest.mark.parametrize("path", BOARDS, ids=lambda path: path.stem)
def test_the_body_for_the_api_is_the_dashboard(path):
    body = json.loads(run(GENERATOR, "--api-body", path.stem).stdout)
    assert body == {"dashboard": json.loads(path.read_text()), "overwrite": True}


def test_kustomize_takes_every_dashboard():
    kustomization = yaml.safe_load((MONITORING / "kustomization.yaml").read_text())
    files = {file for generator in kustomization["configMapGenerator"] for file in generator["files"]}
    assert files == {f"dashboards/{path.name}" for path in BOARDS}
    assert kustomization["generatorOptions"]["labels"]["grafana_dashboard"] == "1"
    for file in [*files, *kustomization["resources"]]:
        assert (MONITORING / file).is_file()
