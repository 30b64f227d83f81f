"""The query that wakes a deployment from zero and lets it go again, asked of Prometheus' own evaluator."""

import subprocess

import pytest
import yaml

from processes import program

SERIES = 'nginx_ingress_controller_requests{exported_namespace="octavo", ingress="octavo", status="%s"}'


@pytest.fixture
def query(renderings):
    (scaled,) = renderings["helm elastic"].of("ScaledObject")
    return next(trigger for trigger in scaled["spec"]["triggers"] if trigger["name"] == "keepalive")["metadata"]["query"]


def replicas(folder, query, series, minutes):
    """Whether the query is 1 or 0 at each of these minutes, as promtool says; the series have a value a minute."""
    expected = [{"eval_time": f"{at}m", "expr": query, "exp_samples": [{"labels": "{}", "value": value}]} for at, value in minutes.items()]
    return evaluated(folder, series, expected)


def evaluated(folder, series, expected):
    """Whether promtool finds what is expected, and what it printed."""
    test = {"interval": "1m", "input_series": series, "promql_expr_test": expected}
    path = folder / "test.yaml"
    path.write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": [test]}))
    done = subprocess.run([program("promtool"), "test", "rules", path], capture_output=True, text=True)
    return done.returncode == 0, done.stdout + done.stderr


def test_a_first_request_wakes_and_a_pause_lets_go(query, tmp_path):
    # The controller has answered other requests long ago; its first 503 begins a series, and there is no other.
    series = [
        {"series": SERIES % "200", "values": "7x60"},
        {"series": SERIES % "503", "values": "_x20 1x40"},
        {"series": SERIES.replace('"octavo", ingress', '"other", ingress') % "200", "values": "0+5x60"},
    ]
    minutes = {15: 0, 20: 1, 29: 1, 31: 0, 45: 0}
    right, output = replicas(tmp_path, query, series, minutes)
    assert right, output
    # What the query was before: it sees no increase.
    grown = f"sum(increase({(SERIES % '503').replace(', status=' + chr(34) + '503' + chr(34), '')}[10m])) > bool 0"
    assert not replicas(tmp_path, grown, series, minutes)[0]


def test_traffic_keeps_it_awake_at_one(query, tmp_path):
    series = [{"series": SERIES % "200", "values": "_x5 1+1x20 21x40"}, {"series": SERIES % "503", "values": "_x5 3x60"}]
    right, output = replicas(tmp_path, query, series, {4: 0, 6: 1, 20: 1, 30: 1, 37: 0})
    assert right, output


def test_without_an_ingress_controller_it_is_zero(query, tmp_path):
    right, output = replicas(tmp_path, query, [{"series": "up", "values": "1x10"}], {5: 0})
    assert right, output


@pytest.mark.parametrize("trigger", ["waiting", "running"])
def test_missing_metrics_are_zero_only_at_zero_replicas(renderings, tmp_path, trigger):
    (scaled,) = renderings["helm elastic"].of("ScaledObject")
    query = next(it for it in scaled["spec"]["triggers"] if it["name"] == trigger)["metadata"]["query"]
    metric = f"vllm:num_requests_{trigger}"
    series = [
        {"series": 'kube_deployment_spec_replicas{namespace="octavo", deployment="octavo"}', "values": "0x10 1x40"},
        # A namesake in another namespace.
        {"series": metric + '{namespace="other", job="octavo", pod="x"}', "values": "90x50"},
        {"series": metric + '{namespace="octavo", job="octavo", pod="a"}', "values": "_x20 7x10 stale"},
    ]
    labels = '{namespace="octavo", deployment="octavo"}'
    samples = {5: [{"labels": f"kube_deployment_spec_replicas{labels}", "value": 0}], 15: [], 25: [{"labels": "{}", "value": 7}], 40: []}
    expected = [{"eval_time": f"{at}m", "expr": query, "exp_samples": wanted} for at, wanted in samples.items()]
    right, output = evaluated(tmp_path, series, expected)
    assert right, output
