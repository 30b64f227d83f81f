"""A client of the completions route that looks at each event, and a load of several kinds of requests."""

import http.client
import itertools
import json
import threading
import time


class Failure(Exception):
    """A request that was not answered to its end; `backend` is the server that had it, if the proxy told."""

    def __init__(self, reason, backend=None):
        super().__init__(reason)
        self.backend = backend


class Answer:
    """A streamed answer: the times of its events since the request, its tokens by the server's count, its end."""

    def __init__(self):
        self.times = []
        self.tokens = 0
        self.finish = None
        self.done = False
        self.backend = None


def body(prompt, max_tokens, **more):
    return json.dumps({"model": "tiny", "prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, **more})


def post(port, text, timeout=60):
    """Status, header fields and text of a completion that is not streamed."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    try:
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        return response.status, response.headers, response.read().decode()
    finally:
        connection.close()


def stream(port, prompt, max_tokens, *, leave_after=None, timeout=60, **more):
    """A streamed completion; with `leave_after` the connection is closed after so many events.

    Raises `Failure` unless the stream is whole: a finish reason, the end marker, no error event.
    """
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
    answer = Answer()
    begin = time.monotonic()
    try:
        text = body(prompt, max_tokens, stream=True, stream_options={"include_usage": True}, **more)
        connection.request("POST", "/v1/completions", text, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer.backend = response.headers.get("X-Backend")
        if response.status != 200:
            raise Failure(f"status {response.status}: {response.read(200)!r}", answer.backend)
        for line in response:
            if not line.startswith(b"data: "):
                continue
            if line == b"data: [DONE]\n":
                answer.done = True
                break
            if b'"usage":{' in line:
                answer.tokens = json.loads(line[6:])["usage"]["completion_tokens"]
                continue
            answer.times.append(time.monotonic() - begin)
            if leave_after and len(answer.times) >= leave_after:
                return answer
            if b'"error"' in line:
                raise Failure(f"error event: {line[:200]!r}", answer.backend)
            if b'"finish_reason":"' in line:
                answer.finish = json.loads(line[6:])["choices"][0]["finish_reason"]
    except (OSError, http.client.HTTPException) as error:
        raise Failure(repr(error), answer.backend) from error
    finally:
        connection.close()
    if not answer.done or answer.finish not in ("length", "stop"):
        raise Failure(f"cut after {len(answer.times)} events", answer.backend)
    return answer


class Team:
    """Threads that send one request after the other until they are stopped."""

    def __init__(self, port, count):
        self.port = port
        self.stopping = threading.Event()
        self.failures = []
        self.threads = [threading.Thread(target=self.work, args=(index,), daemon=True) for index in range(count)]

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        for thread in self.threads:
            thread.join(60)

    def work(self, index):
        for turn in itertools.count():
            if self.stopping.is_set():
                return
            self.turn(index, turn)

    def turn(self, index, turn):
        """One request of a thread, its failure among the others."""
        raise NotImplementedError


class MixedLoad(Team):
    """Streams, whole answers, aborted streams and prompts that begin alike, in rounds until it is stopped.

    A round's requests come at the same time and ask for more KV blocks than `FEW_BLOCKS` gives: some wait, some are
    preempted. Between two rounds the machine rests.
    """

    FEW_BLOCKS = ("--max-model-len", "256", "--max-num-seqs", "6", "--num-gpu-blocks-override", "24")
    ROUND = 0.3
    TOKENS = 180

    SHARED = "These words are the beginning of every other prompt here. " * 2

    def __init__(self, port, clients=8):
        super().__init__(port, clients)
        self.first_event = []
        self.tokens = []

    def turn(self, index, turn):
        try:
            self.request((index + turn) % 4, f"{index} {turn} ")
        except Exception as error:
            self.failures.append(error)
        self.stopping.wait(self.ROUND - time.monotonic() % self.ROUND)

    def request(self, kind, words):
        if kind == 0:
            answer = stream(self.port, self.SHARED + words, self.TOKENS, leave_after=3)
            self.first_event.append(answer.times[0])
            return
        if kind == 1:
            begin = time.monotonic()
            status, _, text = post(self.port, body(words, self.TOKENS))
            assert status == 200, text
            # All that is known of its first token: it was there by then.
            self.first_event.append(time.monotonic() - begin)
            self.tokens.append(json.loads(text)["usage"]["completion_tokens"])
        else:
            answer = stream(self.port, self.SHARED + words if kind == 2 else words, self.TOKENS)
            self.first_event.append(answer.times[0])
            self.tokens.append(answer.tokens)
