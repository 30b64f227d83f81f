"""Every query of the article's dashboards and of ours, asked of a Prometheus that scrapes a server under load."""

import json
import math
import re
import subprocess

import pytest

import article
import client
import gpus
from places import MONITORING, OCTAVO, free_port
from processes import program, running, until
from prometheus import scraping
from serving import SMALL, serving

# What a value of the unit may be. A time in milliseconds, a share times 100 or MiB for bytes would be outside.
RANGES = {
    "reqps": (0, 1e5),
    "ops": (0, 1e6),
    "tps": (0, 1e7),
    "suffix: tok/s": (0, 1e7),
    "short": (0, 1e9),
    "s": (0, 60),
    "percent": (0, 100),
    "percentunit": (0, 1),
    # An overspent budget is negative, by a multiple of the small share that it allows.
    "budget": (-1000, 1),
    "Bps": (0, 1e11),
    "flops": (0, 1e15),
    "bytes": (1e6, 1e13),
    "decgbytes": (1, 200),
    "hertz": (1e8, 2e10),
    "celsius": (20, 100),
    "watt": (50, 1000),
    "joule": (1e-6, 1e5),
}
BOARDS = sorted((MONITORING / "dashboards").glob("*.json"))
VALUES = {
    "$__rate_interval": "1m",
    "$__range": "5m",
    "$job": "octavo",
    "$pod": ".*",
    "$model_name": ".*",
    "$node": ".*",
    "$gpu": ".*",
}


def with_values(expression):
    for variable, value in VALUES.items():
        expression = expression.replace(variable, value)
    return expression


def ours():
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            units = {
                o["matcher"]["options"]: o["properties"][0]["value"]
                for o in panel.get("fieldConfig", {}).get("overrides", [])
            }
            names = next(
                (t["options"]["renameByName"] for t in panel.get("transformations", []) if t["id"] == "organize"), {}
            )
            for target in panel.get("targets", []):
                column = names.get(f"Value #{target['refId']}", names.get("Value"))
                unit = units.get(column, panel["fieldConfig"]["defaults"]["unit"])
                # A heat map's unit is that of its axis; its values are counts.
                unit = "short" if panel["type"] == "heatmap" else unit
                unit = "budget" if panel["title"] == "Budget left" else unit
                expression = with_values(target["expr"])
                yield pytest.param(unit, expression, id=f"{path.stem}-{panel['id']}{target['refId']}-{panel['title']}")


def theirs():
    for name, queries in (("application", article.APPLICATION), ("hardware", article.HARDWARE)):
        for number, (unit, expression) in enumerate(queries):
            yield pytest.param(unit, expression, id=f"article-{name}-{number}")


@pytest.fixture(scope="module")
def loaded(model, tmp_path_factory):
    """The server, the load and the Prometheus, once every kind of request has been seen."""
    folder = tmp_path_factory.mktemp("dashboards")
    node_port = free_port()
    node = [program("prometheus-node-exporter"), f"--web.listen-address=127.0.0.1:{node_port}"]
    with (
        serving(*client.MixedLoad.FEW_BLOCKS, model=model) as server,
        gpus.exporter() as gpu_port,
        running(node, folder / "node.log", f"http://127.0.0.1:{node_port}/metrics"),
        client.MixedLoad(server.port) as load,
    ):
        # The labels that ServiceMonitors add.
        pod = {"pod": "octavo-a", "node": "node-a", "namespace": "vllm", "service": "octavo"}
        gpu = {"kubernetes_node": "node-a", "namespace": "gpu-operator", "pod": "dcgm-a"}
        jobs = {
            "octavo": [(server.address, pod)],
            "nvidia-dcgm-exporter": [(f"127.0.0.1:{gpu_port}", gpu)],
            "node-exporter": [(f"127.0.0.1:{node_port}", {})],
        }
        rules = [MONITORING / "recording.yaml", MONITORING / "alerts.yaml"]
        with scraping(folder, jobs, rules=rules) as prometheus:
            until(
                "scrapes", lambda: prometheus.value('min(count_over_time(up{job=~"octavo|n.*"}[1m]))') >= 8, pause=0.5
            )
            yield server, load, prometheus


def test_the_load_is_of_every_kind(loaded):
    server, load, prometheus = loaded
    assert not load.failures
    increased = [
        'vllm:request_success_total{finished_reason="length"}',
        'vllm:request_success_total{finished_reason="abort"}',
        "vllm:num_preemptions_total",
        "vllm:prefix_cache_hits_total",
        "vllm:prompt_tokens_cached_total",
        'http_requests_total{handler="/v1/completions",status="2xx"}',
    ]
    for series in increased:
        assert prometheus.value(f"sum(increase({series}[1m]))") > 0, series
    # Prometheus looks once a second, between most of the rounds.
    until("requests wait", lambda: server.metric("vllm:num_requests_waiting") > 0, pause=0.01)
    until("blocks are in use", lambda: server.metric("vllm:kv_cache_usage_perc") > 0.5, pause=0.01)


def of_keys(case):
    """Whether a query is about API keys, which the load has none of."""
    return "octavo_key_" in case.values[1]


@pytest.mark.parametrize(("unit", "expression"), [*theirs(), *(case for case in ours() if not of_keys(case))])
def test_a_query_has_data_in_its_unit(loaded, unit, expression):
    check_unit(loaded[2].query(expression), unit)


@pytest.mark.parametrize(("unit", "expression"), [case for case in ours() if of_keys(case)])
def test_a_query_of_keys_tells_them_apart(keyed, unit, expression):
    result = keyed.query(expression)
    check_unit(result, unit)
    assert {labels["key_name"] for labels, _ in result} == {"team-a", "team-b"}
    if "rejections" in expression:
        limited = {labels["limit"] for labels, value in result if value > 0}
        assert limited == {"requests_per_minute"}


def check_unit(result, unit):
    assert result, "no data"
    low, high = RANGES[unit]
    for labels, value in result:
        assert math.isfinite(value) and low <= value <= high, f"{value} of {labels} is no value in {unit}"


def new_key(name, *limits):
    """The entry of a key in the file, and the key."""
    done = subprocess.run([OCTAVO, "key", name, *limits], capture_output=True, text=True, check=True)
    return done.stdout, done.stderr.split()[-1]


@pytest.fixture(scope="module")
def keyed(model, tmp_path_factory):
    """A Prometheus that has seen two API keys in use, of which one is limited."""
    folder = tmp_path_factory.mktemp("keyed")
    entries, keys = zip(new_key("team-a"), new_key("team-b", "--requests-per-minute", "1"), strict=True)
    (folder / "keys.yaml").write_text("".join(entries))
    with serving(*SMALL, "--api-keys-file", str(folder / "keys.yaml"), model=model) as server:
        jobs = {"octavo": [(server.address, {"pod": "octavo-a", "namespace": "vllm"})]}
        with scraping(folder, jobs) as prometheus:
            until("a scrape before the load", lambda: prometheus.query("octavo_key_requests_total"), pause=0.5)
            completion = {"prompt": "a", "max_tokens": 2}
            asked = [server.ask(completion, Authorization=f"Bearer {key}")[0] for key in keys for _ in range(2)]
            assert asked == [200, 200, 200, 429]
            until("a scrape after it", lambda: prometheus.value("sum(increase(octavo_key_rejections_total[1m]))") > 0, pause=0.5)
            yield prometheus


@pytest.fixture(scope="module")
def idle(model, tmp_path_factory):
    """A server that nobody asks anything, and its Prometheus."""
    folder = tmp_path_factory.mktemp("idle")
    with serving(*SMALL, model=model) as server, gpus.exporter() as gpu_port:
        jobs = {
            "octavo": [(server.address, {"pod": "octavo-a", "namespace": "vllm"})],
            "nvidia-dcgm-exporter": [(f"127.0.0.1:{gpu_port}", {"kubernetes_node": "node-a"})],
        }
        with scraping(folder, jobs, rules=[MONITORING / "recording.yaml"]) as prometheus:
            until("scrapes", lambda: prometheus.value('min(count_over_time(up{job="octavo"}[1m]))') >= 4, pause=0.5)
            yield prometheus


def numbers():
    """The expressions of the panels that show one number."""
    for path in BOARDS:
        for panel in json.loads(path.read_text())["panels"]:
            if panel["type"] == "stat" or panel.get("fieldConfig", {}).get("defaults", {}).get("unit") == "joule":
                for target in panel["targets"]:
                    yield pytest.param(with_values(target["expr"]), id=f"{path.stem}-{panel['title']}")


@pytest.mark.parametrize("expression", [*numbers()])
def test_a_number_is_never_nan_or_infinite(idle, expression):
    """Nor over a night without requests, where shares and quantiles are of nothing."""
    assert all(math.isfinite(value) for _, value in idle.query(expression)), idle.query(expression)


def test_every_variable_has_values(loaded):
    found = {}
    for path in BOARDS:
        for variable in json.loads(path.read_text())["templating"]["list"]:
            if variable["type"] == "query":
                series, label = re.fullmatch(r"label_values\((.*), (\w+)\)", variable["query"]["query"]).groups()
                found[variable["name"]] = loaded[2].api(f"label/{label}/values", **{"match[]": with_values(series)})
    expected = {"job": ["octavo"], "model_name": ["tiny"], "pod": ["octavo-a"], "node": ["node-a"], "gpu": ["0", "1"]}
    assert found == expected


@pytest.mark.parametrize("expression", article.EMPTY)
def test_the_known_exception_is_still_one(loaded, expression):
    assert loaded[2].query(expression) == []


def test_times_are_those_that_clients_see(loaded):
    _, load, prometheus = loaded
    bounds = [0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80]
    seen = prometheus.value("histogram_quantile(0.95, sum by (le) (rate(vllm:time_to_first_token_seconds_bucket[5m])))")
    # The slowest may still be under way.
    slowest = 2 * max(load.first_event)
    assert 0 < seen <= next(bound for bound in bounds if bound >= slowest)


def test_counts_are_those_of_the_clients(loaded):
    server, load, _ = loaded
    # What is in flight is counted by the server alone; aborted streams too.
    told, counted = sum(load.tokens), server.metric("vllm:generation_tokens_total")
    assert told <= counted <= 2 * told + 8 * load.TOKENS


def test_alerts_that_need_no_cluster_are_quiet_and_evaluated(loaded):
    prometheus = loaded[2]
    groups = prometheus.api("rules")["groups"]
    rules = [rule for group in groups for rule in group["rules"]]
    assert {rule["health"] for rule in rules} == {"ok"}, [rule for rule in rules if rule["health"] != "ok"]
    firing = {rule["name"] for rule in rules if rule.get("state") == "firing"}
    assert not firing & {"OctavoDown", "OctavoAllDown", "OctavoTargetMissing", "OctavoStalled"}


@pytest.mark.parametrize("page", sorted((MONITORING.parent / "runbooks").glob("*.md")), ids=lambda path: path.stem)
def test_the_queries_of_a_runbook_are_understood(loaded, page):
    queries = re.findall(r"```promql\n(.*?)```", page.read_text(), re.DOTALL)
    assert queries
    for query in queries:
        loaded[2].query(query)


def test_every_metric_of_ours_is_exported(loaded):
    """Of rules, runbooks and dashboards; what comes from elsewhere is recognised by its prefix."""
    prometheus = loaded[2]
    known = set(prometheus.api("label/__name__/values"))
    texts = [(MONITORING / name).read_text() for name in ("alerts.yaml", "recording.yaml")]
    texts += [page.read_text() for page in (MONITORING.parent / "runbooks").glob("*.md")]
    texts += [board.read_text() for board in BOARDS]
    names = set(re.findall(r"\b(?:vllm:|http_|process_)[a-z0-9_]+", "\n".join(texts)))
    assert len(names) > 25
    assert names - known - {name[: -len(end)] for name in known for end in ("_bucket",)} == set()
