"""KV events of the real server as a router reads them: with ZeroMQ's own library, vLLM's message types and its hashes."""

import contextlib
import hashlib
import json
import socket as sockets
import time
from typing import Any

import cbor2
import msgspec
import pytest
import zmq

from serving import free_port, serving, until

BLOCK = 16
WAIT = 10_000
PROMPT = [3 + n % 250 for n in range(100)]


class Event(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class BlockStored(Event):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class BlockRemoved(Event):
    block_hashes: list[int | bytes]
    medium: str | None


class Batch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved]
    data_parallel_rank: int | None = None


class OldEvent(msgspec.Struct, array_like=True, omit_defaults=True, tag=True):
    pass


class OldStored(OldEvent, tag="BlockStored"):
    block_hashes: list[int | bytes]
    parent_block_hash: int | bytes | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None


class OldRemoved(OldEvent, tag="BlockRemoved"):
    block_hashes: list[int | bytes]
    medium: str | None


class OldBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[OldStored | OldRemoved]
    data_parallel_rank: int | None = None


def chain(tokens, seed="vllm-none-hash", salt=None):
    """The hashes of the full blocks of a prompt, as vLLM's sha256_cbor makes them."""
    digest = lambda value: hashlib.sha256(cbor2.dumps(value, canonical=True)).digest()
    parent, hashes = digest(seed), []
    for start in range(0, len(tokens) - len(tokens) % BLOCK, BLOCK):
        extra = (("cache_salt", salt),) if salt and start == 0 else None
        parent = digest((parent, tuple(tokens[start:start + BLOCK]), extra))
        hashes.append(parent)
    return hashes


def short(digest):
    return int.from_bytes(digest, "big") & (2**64 - 1)


class Router:
    """A subscriber."""

    def __init__(self, port, topic="", batch=Batch, bind=False):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        address = f"tcp://127.0.0.1:{port}"
        self.socket.bind(address) if bind else self.socket.connect(address)
        self.decoder = msgspec.msgpack.Decoder(batch)

    def next(self):
        topic, sequence, payload = self.socket.recv_multipart()
        return topic.decode(), int.from_bytes(sequence, "big"), self.decoder.decode(payload)

    def close(self):
        self.socket.close(linger=0)


@contextlib.contextmanager
def publishing(*flags, variables=None, **config):
    config = {"enable_kv_cache_events": True, "publisher": "zmq", **config}
    with serving("--kv-events-config", json.dumps(config), "--block-size", str(BLOCK), *flags, **(variables or {})) as server:
        yield server


def ask(server, prompt=PROMPT, **more):
    status, text = server.ask({"prompt": prompt, "max_tokens": 1, "temperature": 0, **more})
    assert status == 200, text


def listening(server, router, other):
    """A subscription takes a moment to arrive: requests until a batch does."""
    router.socket.setsockopt(zmq.RCVTIMEO, 200)
    for attempt in range(50):
        ask(server, [other, attempt + 3] * BLOCK)
        with contextlib.suppress(zmq.Again):
            seen = router.next()
            break
    else:
        pytest.fail("nothing is published")
    # Whatever was on its way comes before what the test is about.
    with contextlib.suppress(zmq.Again):
        while True:
            seen = router.next()
    router.socket.setsockopt(zmq.RCVTIMEO, WAIT)
    return seen[1]


@pytest.mark.parametrize("numbers", [True, False])
def test_what_is_stored_has_vllms_hashes(numbers):
    port = free_port()
    variables = {} if numbers else {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    shown = short if numbers else bytes
    with publishing(endpoint=f"tcp://*:{port}", topic="kv@tiny", variables=variables) as server:
        router = Router(port, "kv@")
        last = listening(server, router, 260)
        ask(server)
        topic, sequence, batch = router.next()
        assert (topic, sequence, batch.data_parallel_rank) == ("kv@tiny", last + 1, 0)
        assert abs(batch.ts - time.time()) < 60
        [event] = batch.events
        assert event.block_hashes == [shown(digest) for digest in chain(PROMPT)]
        assert (event.parent_block_hash, event.block_size, event.medium) == (None, BLOCK, "GPU")
        assert event.token_ids == PROMPT[:96]
        # The same again stores nothing; what goes on from there names its parent.
        ask(server)
        ask(server, PROMPT[:96] + [9] * 32)
        _, sequence, batch = router.next()
        longer = chain(PROMPT[:96] + [9] * 32)
        assert sequence == last + 2, "one batch a step that stores something"
        [event] = batch.events
        assert event.parent_block_hash == shown(longer[5])
        assert event.block_hashes == [shown(digest) for digest in longer[6:]]
        router.close()


def test_salt_and_seed_are_in_the_hashes():
    port = free_port()
    with publishing(endpoint=f"tcp://*:{port}", variables={"PYTHONHASHSEED": "0"}) as server:
        router = Router(port)
        listening(server, router, 260)
        ask(server, cache_salt="tenant-1")
        [event] = router.next()[2].events
        assert event.block_hashes == [short(digest) for digest in chain(PROMPT, "0", "tenant-1")]
        assert event.extra_keys == [(["cache_salt", "tenant-1"],)] + [None] * 5
        router.close()


def test_what_is_evicted_is_removed():
    port = free_port()
    with publishing("--num-gpu-blocks-override", "17", "--max-model-len", "128", endpoint=f"tcp://*:{port}") as server:
        router = Router(port)
        listening(server, router, 260)
        ask(server)
        known = set()
        for first in range(3, 30):
            ask(server, [first, first + 1] * 48)
        seen = []
        router.socket.setsockopt(zmq.RCVTIMEO, 500)
        with contextlib.suppress(zmq.Again):
            while True:
                seen += router.next()[2].events
        mine = {short(digest) for digest in chain(PROMPT)}
        for event in seen:
            if isinstance(event, BlockStored):
                assert not known & set(event.block_hashes), "nothing is stored twice"
                known |= set(event.block_hashes)
            else:
                known -= set(event.block_hashes)
        removed = {digest for event in seen if isinstance(event, BlockRemoved) for digest in event.block_hashes}
        assert mine <= removed and not mine & known
        assert len(known) <= 17, "no more than there are blocks"
        router.close()


def test_missed_batches_are_replayed():
    port, replay = free_port(), free_port()
    with publishing(endpoint=f"tcp://*:{port}", replay_endpoint=f"tcp://127.0.0.1:{replay}", buffer_steps=3) as server:
        for first in range(5):
            ask(server, [200 + first] * 20)
        socket = zmq.Context.instance().socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, WAIT)
        socket.connect(f"tcp://127.0.0.1:{replay}")

        def replayed(start):
            socket.send_multipart([b"", start.to_bytes(8, "big")])
            batches = []
            while True:
                empty, topic, sequence, payload = socket.recv_multipart()
                assert (empty, topic) == (b"", b"")
                sequence = int.from_bytes(sequence, "big", signed=True)
                if sequence == -1:
                    assert payload == b""
                    return batches
                batches.append((sequence, msgspec.msgpack.decode(payload, type=Batch)))

        # An answer may be there a moment before its blocks are told.
        until(lambda: [sequence for sequence, _ in replayed(0)] == [2, 3, 4], "as many as are kept")
        [(sequence, batch)] = replayed(4)
        assert (sequence, batch.events[0].token_ids) == (4, [204] * 16)
        assert replayed(5) == []
        socket.close(linger=0)


def test_a_router_may_listen_and_older_ones_read_arrays():
    port = free_port()
    router = Router(port, batch=OldBatch, bind=True)
    with publishing(endpoint=f"tcp://127.0.0.1:{port}", encoding="array") as server:
        listening(server, router, 260)
        ask(server)
        [event] = router.next()[2].events
        assert event.block_hashes == [short(digest) for digest in chain(PROMPT)]
        assert (event.token_ids, event.medium) == (PROMPT[:96], "GPU")
    router.close()


def test_strangers_and_silent_subscribers_delay_nobody():
    port = free_port()
    with publishing(endpoint=f"tcp://*:{port}", hwm=1) as server:
        stranger = sockets.create_connection(("127.0.0.1", port))
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + b"x" * 64)
        # One that subscribes and never reads.
        silent = sockets.create_connection(("127.0.0.1", port))
        greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16) + bytes(32)
        silent.sendall(greeting[:64] + b"\x04\x19\x05READY\x0bSocket-Type\x00\x00\x00\x03SUB" + b"\x00\x01\x01")
        router = Router(port)
        listening(server, router, 260)
        for first in range(3, 200):
            ask(server, [first, 3] * 48)
        for connection in (stranger, silent):
            connection.close()
        router.close()


def test_nothing_listens_unless_it_is_asked_for():
    port = free_port()
    config = json.dumps({"enable_kv_cache_events": False, "endpoint": f"tcp://*:{port}"})
    with serving("--kv-events-config", config) as server:
        ask(server)
        with sockets.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
