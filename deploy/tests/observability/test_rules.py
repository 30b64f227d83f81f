"""Prometheus' own checks of the configuration and the rules; the rules' unit tests; and that these tests see a change."""

import concurrent.futures
import re
import subprocess

import pytest
import yaml

from processes import MONITORING, program

TESTS = MONITORING / "alerts_test.yaml"
RULES = ("recording.yaml", "alerts.yaml")


def run(*command, cwd=MONITORING):
    result = subprocess.run([*map(str, command)], capture_output=True, text=True, check=False, cwd=cwd)
    return result.returncode, result.stdout + result.stderr


@pytest.mark.parametrize(
    "command",
    [
        ("promtool", "check", "config", "prometheus.yml"),
        ("promtool", "check", "rules", "--lint=all", "--lint-fatal", *RULES),
        ("promtool", "test", "rules", TESTS.name),
        ("amtool", "check-config", "alertmanager.yaml"),
    ],
    ids=" ".join,
)
def test_promtool_and_amtool_agree(command):
    status, output = run(program(command[0]), *command[1:])
    assert status == 0, output


@pytest.mark.parametrize(
    ("labels", "receiver"),
    [
        ("alertname=OctavoDown severity=critical", "on-call"),
        ("alertname=OctavoPreemptions severity=warning", "team"),
        ("alertname=GpuIdle severity=info", "nobody"),
        ("alertname=Watchdog severity=none", "nobody"),
    ],
)
def test_alerts_go_where_they_should(labels, receiver):
    status, output = run(program("amtool"), "config", "routes", "test", "--config.file=alertmanager.yaml", *labels.split())
    # A warning may follow.
    assert (status, output.split()[0]) == (0, receiver)


def mutants():
    """Each threshold of each alert a tenth higher and a tenth lower; one of zero, and an alert without, out of reach."""
    for group in yaml.safe_load((MONITORING / "alerts.yaml").read_text())["groups"]:
        for rule in group["rules"]:
            numbers = sorted(set(re.findall(r"(?:[<>]=?|==) (\d+(?:\.\d+)?)", rule["expr"])))
            if not numbers:
                yield rule["alert"], "", ""
            for number in numbers:
                for factor in (0.9, 1.1) if float(number) else (None,):
                    changed = f"{float(number) * factor:g}" if factor else "1e9"
                    yield rule["alert"], number, changed


def mutated(alert, number, changed):
    """alerts.yaml with another threshold in one alert."""
    text = (MONITORING / "alerts.yaml").read_text()
    begin = text.index(f"- alert: {alert}\n")
    end = text.index("labels: {", begin)
    if number:
        rule = re.sub(rf"([<>]=?|==) {re.escape(number)}(?![\d.])", rf"\1 {changed}", text[begin:end])
    else:
        rule = f"- alert: {alert}\n        expr: vector(0) > 1\n        "
    assert rule != text[begin:end]
    return text[:begin] + rule + text[end:]


def survives(folder, mutant):
    """Whether the tests that speak of the alert pass with the mutant in its place."""
    alert = mutant[0]
    suite = yaml.safe_load(TESTS.read_text())
    suite["tests"] = [test for test in suite["tests"] if alert in str(test)]
    assert suite["tests"], f"no test of {alert}"
    place = folder / "-".join(mutant)
    place.mkdir()
    (place / "alerts.yaml").write_text(mutated(*mutant))
    (place / "recording.yaml").write_text((MONITORING / "recording.yaml").read_text())
    (place / "test.yaml").write_text(yaml.safe_dump(suite))
    status, output = run(program("promtool"), "test", "rules", "test.yaml", cwd=place)
    # A mutant that is not even read proves nothing.
    assert status == 0 or "FAILED" in output and "parse" not in output, output
    return status == 0


def test_a_threshold_that_moves_fails_a_test(tmp_path):
    every = list(mutants())
    assert len(every) > 40
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        alive = [mutant for mutant, lives in zip(every, pool.map(lambda mutant: survives(tmp_path, mutant), every)) if lives]
    assert alive == []
