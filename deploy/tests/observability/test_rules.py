"""Prometheus' own checks of configuration and rules, the rules' unit tests, and that these tests see a change."""

import concurrent.futures
import re
import subprocess

import pytest
import yaml

from places import MONITORING
from processes import program

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
    status, output = run(
        program("amtool"), "config", "routes", "test", "--config.file=alertmanager.yaml", *labels.split()
    )
    # A warning may follow.
    assert (status, output.split()[0]) == (0, receiver)


def mutants():
    """Each threshold of each alert a tenth higher and lower; one of zero, and an alert without, out of reach."""
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


def suite(place, tests, alerts):
    """Whether these tests pass with these alerts; the files are left in the folder `place`."""
    # Where the data comes once a minute, looking twice tells nothing more and takes twice as long.
    interval = "1m" if all(test["interval"] == "1m" for test in tests) else "30s"
    place.mkdir()
    (place / "alerts.yaml").write_text(alerts)
    (place / "recording.yaml").write_text((MONITORING / "recording.yaml").read_text())
    (place / "test.yaml").write_text(
        yaml.safe_dump({"rule_files": list(RULES), "evaluation_interval": interval, "tests": tests})
    )
    status, output = run(program("promtool"), "test", "rules", "test.yaml", cwd=place)
    # A file that is not even read proves nothing.
    assert status == 0 or ("FAILED" in output and "parse" not in output), output
    return status == 0


def test_a_threshold_that_moves_fails_a_test(tmp_path):
    tests = yaml.safe_load(TESTS.read_text())["tests"]
    minutely = [test for test in tests if test["interval"] == "1m"]
    assert suite(tmp_path / "unchanged", minutely, (MONITORING / "alerts.yaml").read_text())

    def survives(mutant):
        # The tests that speak of the alert.
        chosen = [test for test in tests if mutant[0] in str(test)]
        assert chosen, f"no test of {mutant[0]}"
        return suite(tmp_path / "-".join(mutant), chosen, mutated(*mutant))

    every = list(mutants())
    assert len(every) > 40
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        assert [mutant for mutant, alive in zip(every, pool.map(survives, every)) if alive] == []
