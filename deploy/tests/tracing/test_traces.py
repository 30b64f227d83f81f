"""Traces of the real server, as a real collector receives them."""

import http.server
import json
import os
import re
import subprocess
import threading
import urllib.request
import uuid

import pytest

from places import DEPLOY, OCTAVO, TINY
from processes import until
from serving import command, environment, serving

SECRET = "the prompt that nobody may see"

# Longer than any test waits for, also on a fast machine.
LONG = {"prompt": "x", "n": 64, "max_tokens": 200, "ignore_eos": True, "stream": True}


class Trace:
    """A trace that a request belongs to."""

    def __init__(self, sampled=True):
        self.id, self.parent = uuid.uuid4().hex, uuid.uuid4().hex[:16]
        self.header = f"00-{self.id}-{self.parent}-0{int(sampled)}"


def test_a_streamed_request(server, collector, protocol):
    trace, request_id = Trace(), uuid.uuid4().hex
    body = {"prompt": SECRET, "max_tokens": 8, "ignore_eos": True, "stream": True, "temperature": 0.5, "top_p": 0.9}
    status, text = server.ask(body, traceparent=trace.header, x_request_id=request_id)
    assert status == 200 and text.endswith("data: [DONE]\n\n")
    span = collector.span(request_id)
    assert (span["Name"], span["Kind"]) == ("llm_request", "SPAN_KIND_SERVER")
    assert (span["Trace ID"], span["Parent ID"]) == (trace.id, trace.parent)
    assert span["Status code"] == "STATUS_CODE_UNSET"
    assert span["resource"]["service.name"] == "checkout"
    assert span["resource"]["deployment.environment"] == "test"
    expected = {
        "gen_ai.response.model": "tiny",
        "gen_ai.request.n": 1,
        "gen_ai.request.max_tokens": 8,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.top_p": 0.9,
        "gen_ai.usage.completion_tokens": 8,
        "http.route": "/v1/completions",
        "http.response.status_code": 200,
    }
    assert {name: span.get(name) for name in expected} == expected
    assert "length" in span["gen_ai.response.finish_reasons"]
    assert span["gen_ai.usage.prompt_tokens"] > 0
    latency = {name.rpartition(".")[2]: value for name, value in span.items() if name.startswith("gen_ai.latency.")}
    assert set(latency) == {"time_to_first_token", "e2e", "time_in_queue", "time_in_model_prefill",
                            "time_in_model_decode", "time_in_model_inference"}
    in_model = latency["time_in_model_prefill"] + latency["time_in_model_decode"]
    assert latency["time_in_model_inference"] == pytest.approx(in_model, abs=1e-6)
    assert 0 < latency["time_to_first_token"] < latency["e2e"] < 20
    duration = (int(span["End time"]) - int(span["Start time"])) / 1e9
    assert latency["e2e"] <= duration


def test_an_aborted_request(server, collector):
    trace, request_id = Trace(), uuid.uuid4().hex
    answer = urllib.request.urlopen(server.request(LONG, traceparent=trace.header, x_request_id=request_id))
    assert answer.readline().startswith(b"data: ")
    answer.close()
    span = collector.span(request_id)
    assert (span["Trace ID"], span["Parent ID"]) == (trace.id, trace.parent)
    assert "abort" in span["gen_ai.response.finish_reasons"]
    assert 1 <= span["gen_ai.usage.completion_tokens"] < 64 * 200
    assert span["Status code"] == "STATUS_CODE_UNSET", "it is not the server's fault"


def test_a_refused_request(server, collector):
    trace = Trace()
    status, _ = server.ask({"prompt": SECRET, "max_tokens": -1}, traceparent=trace.header)
    assert status == 400
    of_trace = lambda: [span for span in collector.spans() if span.get("Trace ID") == trace.id]
    [span] = until("the span of a refused request", of_trace)
    assert (span["http.response.status_code"], span["error.type"]) == (400, "400")
    assert "gen_ai.usage.prompt_tokens" not in span


def test_a_failed_request_is_told_while_the_server_ends(collector, protocol):
    request_id = uuid.uuid4().hex
    flags = ["--otlp-traces-endpoint", collector.addresses[protocol], "--shutdown-timeout", "0"]
    # What the last requests have to tell does not wait for its turn.
    variables = {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": protocol, "OTEL_BSP_SCHEDULE_DELAY": "60000"}
    with serving(*flags, **variables) as server:
        with urllib.request.urlopen(server.request(LONG, x_request_id=request_id)) as answer:
            answer.readline()
            server.process.terminate()
            assert b'"error"' in answer.read()
        assert server.process.wait(timeout=10) == 0
    span = collector.span(request_id)
    assert (span["Status code"], span["error.type"]) == ("STATUS_CODE_ERROR", "503")
    assert "error" in span["gen_ai.response.finish_reasons"]
    assert span["resource"]["service.name"] == "octavo"


def test_a_parent_that_is_not_sampled_is_followed(server, collector):
    unsampled, sampled = Trace(sampled=False), Trace()
    for trace in (unsampled, sampled):
        assert server.ask({"prompt": "x", "max_tokens": 1}, traceparent=trace.header)[0] == 200
    seen = lambda: {span.get("Trace ID") for span in collector.spans()} & {unsampled.id, sampled.id}
    assert until("the sampled one", seen) == {sampled.id}


def test_nothing_of_a_prompt_is_sent(server, collector):
    request_id = uuid.uuid4().hex
    assert server.ask({"prompt": SECRET, "max_tokens": 1, "echo": True}, x_request_id=request_id)[0] == 200
    collector.span(request_id)
    assert not [line for line in collector.lines if SECRET in line]


def test_stages_are_told_where_details_are_asked_for(collector):
    endpoint = collector.addresses["grpc"]
    request_id = uuid.uuid4().hex
    with serving("--otlp-traces-endpoint", endpoint, "--collect-detailed-traces", "model,worker") as server:
        assert server.ask({"prompt": "x", "max_tokens": 3}, x_request_id=request_id)[0] == 200
        span = collector.span(request_id)
        below = lambda: [stage for stage in collector.spans() if stage.get("Parent ID") == span["ID"]]
        until("three stages", lambda: len(below()) == 3)
        assert [stage["Name"] for stage in below()] == ["queue", "prefill", "decode"]


def test_lines_of_a_batch_belong_to_their_traces(collector, tmp_path):
    traced, alone = Trace(), Trace()
    line = {"method": "POST", "url": "/v1/completions", "body": {"model": "tiny", "prompt": "x", "max_tokens": 2}}
    lines = [{"custom_id": "a", "traceparent": traced.header, **line}, {"custom_id": "b", **line}]
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["-i", source, "-o", target, "--model", TINY, "--served-model-name", "tiny"]
    endpoint = {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.addresses["http/protobuf"],
                "OTEL_EXPORTER_OTLP_PROTOCOL": "http/protobuf"}
    subprocess.run([OCTAVO, "run-batch", *flags], env=environment(endpoint), check=True, timeout=30, capture_output=True)
    answers = [json.loads(line) for line in target.read_text().splitlines()]
    spans = [collector.span(answer["response"]["request_id"]) for answer in answers]
    assert (spans[0]["Trace ID"], spans[0]["Parent ID"]) == (traced.id, traced.parent)
    assert spans[1]["Trace ID"] not in (traced.id, alone.id)


class Posts(http.server.BaseHTTPRequestHandler):
    """Keeps the headers and the bytes of what is posted."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.posts.append((self.path, self.headers, body))
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_):
        pass


@pytest.fixture
def posts():
    listener = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Posts)
    listener.posts = []
    threading.Thread(target=listener.serve_forever, daemon=True).start()
    yield listener
    listener.shutdown()
    listener.server_close()


def variables_of(posts, **more):
    return {
        "OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{posts.server_port}/otlp",
        "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf",
        **more,
    }


def test_variables_alone_are_enough(posts):
    headers = {"OTEL_EXPORTER_OTLP_TRACES_HEADERS": "authorization=Bearer%20k,x-scope=a"}
    # Spans are few and small: that compression is not served is a warning, and no reason to send none.
    with serving(**variables_of(posts, OTEL_EXPORTER_OTLP_COMPRESSION="gzip", **headers)) as server:
        assert server.ask({"prompt": "x", "max_tokens": 1}, x_request_id="by-variables")[0] == 200
        [(path, headers, body)] = until("a post", lambda: posts.posts)
    assert path == "/otlp/v1/traces"
    assert (headers["authorization"], headers["x-scope"]) == ("Bearer k", "a")
    assert headers["content-type"] == "application/x-protobuf"
    assert b"by-variables" in body


@pytest.mark.parametrize("variables", [
    {"OTEL_TRACES_SAMPLER": "always_off"},
    {"OTEL_TRACES_SAMPLER": "parentbased_traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"},
    {"OTEL_SDK_DISABLED": "true"},
])
def test_what_is_not_wanted_is_not_sent(posts, variables):
    with serving(**variables_of(posts, **variables)) as server:
        assert server.ask({"prompt": "x", "max_tokens": 1})[0] == 200
    assert posts.posts == []


def peers(pid):
    """The sockets of a process that are connected or send datagrams, as the kernel lists them."""
    own = set()
    for handle in os.listdir(f"/proc/{pid}/fd"):
        try:
            own.add(os.readlink(f"/proc/{pid}/fd/{handle}"))
        except FileNotFoundError:
            continue
    rows = []
    for table in ("tcp", "tcp6", "udp", "udp6"):
        with open(f"/proc/{pid}/net/{table}") as lines:
            rows += [(table, line.split()) for line in list(lines)[1:]]
    listening = "0A"
    return [(table, row[1], row[2]) for table, row in rows
            if f"socket:[{row[9]}]" in own and (row[3] != listening or table.startswith("udp"))]


def test_nothing_phones_home():
    with serving() as server:
        trace = Trace()
        assert server.ask({"prompt": "x", "max_tokens": 4}, traceparent=trace.header)[0] == 200
        port = f"{int(server.url.rpartition(':')[2]):04X}"
        connected = [socket for socket in peers(server.process.pid) if not socket[1].endswith(":" + port)]
        assert connected == [], "only clients are connected"
        threads = os.listdir(f"/proc/{server.process.pid}/task")
        names = {open(f"/proc/{server.process.pid}/task/{thread}/comm").read().strip() for thread in threads}
        assert not [name for name in names if re.search("otlp|OpenTelemetry|Batch", name)], names


def test_a_collector_that_is_gone_harms_nobody(posts):
    posts.shutdown()
    posts.server_close()
    with serving(**variables_of(posts, OTEL_EXPORTER_OTLP_TIMEOUT="500")) as server:
        assert server.ask({"prompt": "x", "max_tokens": 4})[0] == 200
        until(lambda: "\n".join(server.log), lambda: any("cannot export traces" in line for line in server.log))
        with urllib.request.urlopen(server.url + "/metrics") as answer:
            assert 'octavo_trace_spans_total{result="failed"} 1' in answer.read().decode()


@pytest.mark.parametrize("flags, variables, part", [
    (["--otlp-traces-endpoint", "ftp://c"], {}, "traces cannot be sent to 'ftp://c'"),
    (["--otlp-traces-endpoint", "http://c"], {"OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/json"}, "grpc or http/protobuf"),
    (["--collect-detailed-traces", "all"], {}, "needs --otlp-traces-endpoint"),
])
def test_what_cannot_work_is_refused_at_once(flags, variables, part):
    run = subprocess.run(command(*flags), env=environment(variables), timeout=10,
                         capture_output=True, text=True)
    assert run.returncode == 1 and part in run.stderr, run.stderr
