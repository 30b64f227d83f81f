"""nginx in front, as the article's ingress sets it up."""

import http.client
import json
import time

import pytest

import client
from nginx import proxying
from processes import until
from serving import serving

ARTICLE_LIMIT = 100 * 1024 * 1024


@pytest.fixture(scope="module")
def server(model):
    # Events of 50 tokens: the model makes thousands a second, and the test is not about reading so many.
    flags = ["--max-model-len", "65536", "--num-gpu-blocks-override", "4100", "--stream-interval", "50"]
    with serving(*flags, model=model) as server:
        yield server


@pytest.fixture(scope="module")
def nginx(server, tmp_path_factory):
    with proxying(tmp_path_factory.mktemp("nginx") / "run", [server.port]) as nginx:
        yield nginx


def aborted(server):
    return server.metric("vllm:request_success_total", finished_reason="abort")


def announce(port, length, **head):
    """Status, type and text of the answer to a request of which only the head is sent; None if there is none yet."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.putrequest("POST", "/v1/completions")
        connection.putheader("Content-Type", "application/json")
        connection.putheader("Content-Length", str(length))
        for name, value in head.items():
            connection.putheader(name, value)
        connection.endheaders()
        response = connection.getresponse()
        return response.status, response.headers["Content-Type"], response.read().decode()
    except TimeoutError:
        return None
    finally:
        connection.close()


def test_events_pass_one_by_one(nginx):
    tokens = 4_000
    times = client.stream(nginx.port, "Tell me a long story", tokens).times
    assert len(times) >= tokens // 50
    # Evenly, as they are made: a proxy that collects would deliver the first half with the second.
    first, middle, last = times[0], times[len(times) // 2], times[-1]
    assert last > 0.2, "too quick to tell"
    assert first < 0.2 * last and 0.2 * last < middle < 0.8 * last, (first, middle, last)


def test_streams_are_not_compressed_and_not_cached(nginx):
    connection = http.client.HTTPConnection("127.0.0.1", nginx.port)
    head = {"Content-Type": "application/json", "Accept-Encoding": "gzip"}
    connection.request("POST", "/v1/completions", client.body("Hello", 200, stream=True), head)
    response = connection.getresponse()
    assert response.headers["Content-Type"].startswith("text/event-stream")
    assert response.headers["Content-Encoding"] is None
    assert response.headers["Cache-Control"] == "no-cache"
    assert response.read().endswith(b"data: [DONE]\n\n")
    connection.close()


def test_nginx_refuses_a_body_beyond_the_article_s_limit(nginx):
    status, kind, text = announce(nginx.port, ARTICLE_LIMIT + 1)
    assert status == 413 and kind == "text/html" and "nginx" in text
    assert announce(nginx.port, ARTICLE_LIMIT) is None, "a body of the limit is waited for"


def test_the_server_refuses_a_body_beyond_its_own(server):
    status, kind, text = announce(server.port, 1 << 40, Expect="100-continue")
    assert status == 413 and kind == "application/json"
    assert json.loads(text)["error"]["code"] == 413


def test_a_body_beyond_nginx_s_default_passes(nginx):
    text = client.body("Hello", 4) + " " * (2 << 20)
    status, _, answer = client.post(nginx.port, text)
    assert status == 200, answer


def test_a_client_that_leaves_is_seen_by_the_server(server, nginx):
    before = aborted(server)
    client.stream(nginx.port, "Leave", 60_000, leave_after=2)
    until("aborted", lambda: aborted(server) == before + 1, limit=5)
    server.idle()


def test_the_read_timeout_cuts_silence_and_the_server_sees_it(server, nginx):
    before = aborted(server)
    # Nothing is sent before the end of an answer that is not streamed.
    long = client.body("Silence", 60_000)
    begin = time.monotonic()
    status, _, _ = client.post(nginx.impatient_port, long)
    took = time.monotonic() - begin
    assert status == 504 and 1.4 < took < 3.5, (status, took)
    until("aborted", lambda: aborted(server) == before + 1, limit=5)
    server.idle()


def test_the_read_timeout_spares_a_stream(server, nginx):
    answer = client.stream(nginx.impatient_port, "Go on", 40_000)
    assert answer.times[-1] > 1.7, "too quick to tell"
    assert answer.finish == "length"


def test_the_article_s_timeouts_are_long_enough(server, nginx):
    status, _, text = client.post(nginx.port, client.body("Long", 8_000))
    assert status == 200 and json.loads(text)["usage"]["completion_tokens"] == 8_000
