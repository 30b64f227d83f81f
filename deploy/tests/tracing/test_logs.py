"""Log lines as JSON, with the ids that lead from a request to its lines and to its trace."""

import json
import re
import subprocess
import urllib.request

import pytest

from places import OCTAVO
from processes import until
from serving import environment, serving

SECRET = "the prompt that nobody may see"
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
HEADERS = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
LONG = {"prompt": SECRET, "n": 64, "max_tokens": 200, "ignore_eos": True, "stream": True}


def lines_of(server, request_id):
    lines = [json.loads(line) for line in list(server.log)]
    return [line for line in lines if line.get("request_id") == request_id]


def test_every_line_is_an_object_and_those_of_a_request_have_its_ids():
    with serving("--log-format", "json", "--enable-log-requests", "--enable-log-outputs") as server:
        for request_id, stream in [("r-1", False), ("r-2", True)]:
            body = {"prompt": "x", "max_tokens": 3, "ignore_eos": True, "stream": stream}
            assert server.ask(body, x_request_id=request_id, **HEADERS)[0] == 200
            both = until(lambda: server.log, lambda: len(found := lines_of(server, request_id)) > 1 and found)
            assert [line["message"] for line in both] == ["received a request", "generated a response"]
            for line in both:
                assert line["trace_id"] == TRACE
                assert (line["level"], line["target"]) == ("INFO", "octavo_server::request_log")
                assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", line["timestamp"])
    for line in server.log:
        assert {"timestamp", "level", "target", "message"} <= set(json.loads(line)), line


def test_a_line_leads_to_the_span(collector):
    with serving("--log-format=json", "--enable-log-requests", "--otlp-traces-endpoint", collector.addresses["grpc"]) as server:
        assert server.ask({"prompt": "x", "max_tokens": 3}, x_request_id="r-3")[0] == 200
        span = collector.span("r-3")
        [line] = lines_of(server, "r-3")
        assert (line["trace_id"], line["span_id"]) == (span["Trace ID"], span["ID"])


@pytest.mark.parametrize("style", ["text", "json"])
def test_one_event_is_one_line_whatever_the_client_sends(style):
    forged = "r\n2026-01-02T03:04:05.678Z ERROR forged\x1b[2J\x9b31m\u2028\u202e\x00\r"
    bias = {str(token): 1.5 for token in range(200)}
    body = {"prompt": "x", "max_tokens": 1, "n": 8, "temperature": 1, "request_id": forged, "logit_bias": bias}
    with serving("--log-format", style, "--enable-log-requests", "--enable-log-outputs", VLLM_LOGGING_LEVEL="DEBUG") as server:
        assert server.ask(body)[0] == 200
        assert server.ask({**body, "max_tokens": -1})[0] == 400
        mine = until(lambda: server.log, lambda: len(found := [line for line in server.log if "forged" in line and "response" in line]) == 8 and found)
        log = list(server.log)
    assert len([line for line in log if "received a request" in line]) == 1, "not one for each sequence"
    assert all(len(line) < 100_000 for line in log), max(map(len, log))
    for line in [*mine, *log]:
        assert not re.search("[\\x00-\\x1f\\x7f-\\x9f\\u2028\\u2029\\u202a-\\u202e]", line.rstrip("\n")), ascii(line)
        assert not line.startswith("2026-01-02T03:04:05.678Z"), line
    if style == "json":
        assert {json.loads(line)["request_id"] for line in mine} == {forged}


def test_no_prompt_is_logged_unless_it_is_asked_for():
    with serving("--log-format", "json", VLLM_LOGGING_LEVEL="DEBUG") as server:
        assert server.ask({"prompt": SECRET, "max_tokens": 3})[0] == 200
        assert server.ask({"prompt": SECRET, "max_tokens": -1})[0] == 400
        with urllib.request.urlopen(server.request(LONG)) as answer:
            answer.readline()
    assert not [line for line in server.log if SECRET in line]
    with serving("--enable-log-requests", VLLM_LOGGING_LEVEL="DEBUG") as server:
        assert server.ask({"prompt": SECRET, "max_tokens": 3}, x_request_id="r-4")[0] == 200
    assert [line for line in server.log if SECRET in line and "request_id=r-4" in line], server.log


def test_lines_of_a_request_have_the_name_of_its_key_and_not_the_key(tmp_path):
    keys = tmp_path / "keys.yaml"
    keys.write_text("- name: team-a\n  key: sk-secret\n")
    with serving("--log-format", "json", "--enable-log-requests", "--api-keys-file", keys, VLLM_LOGGING_LEVEL="DEBUG") as server:
        body = {"prompt": "x", "max_tokens": 1}
        assert server.ask(body, x_request_id="r-5", authorization="Bearer sk-secret")[0] == 200
        assert server.ask(body, x_request_id="r-6", authorization="Bearer sk-wrong")[0] == 401
    assert {line["key_name"] for line in lines_of(server, "r-5")} == {"team-a"}
    assert not [line for line in server.log if "sk-" in line]


@pytest.mark.parametrize("subcommand", [["serve", "/no/such/model", "--port", "0"], ["run-batch", "-i", "/no/such/file", "-o", "/x"]])
def test_why_it_does_not_start_is_a_line_of_the_log(subcommand):
    """What a crash loop has to say is all there is to find it by."""
    command = [OCTAVO, *subcommand, "--log-format", "json"]
    failed = subprocess.run(command, capture_output=True, text=True, env=environment({}), timeout=60)
    assert failed.returncode == 1
    last = [json.loads(line) for line in failed.stderr.splitlines()][-1]
    assert (last["level"], last["target"]) == ("ERROR", "octavo") and "/no/such/" in last["message"], last
    # Where nothing is logged it is still told.
    silent = subprocess.run(command, capture_output=True, text=True, env=environment({"VLLM_LOGGING_LEVEL": "off"}), timeout=60)
    assert silent.returncode == 1 and silent.stderr.startswith("octavo: ") and "/no/such/" in silent.stderr
