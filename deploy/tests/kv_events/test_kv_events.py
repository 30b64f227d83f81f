"""KV events of the real server."""

import json
import socket as sockets
import time

import msgspec
import pytest
import zmq

from places import free_port
from processes import until
from serving import serving
from subscriber import BLOCK, WAIT, Batch, BlockRemoved, BlockStored, OldBatch, Subscriber, ask, chain, publishing, short

PROMPT = [3 + n % 250 for n in range(100)]


def listening(server, router, other):
    """A subscription takes a moment to arrive: requests until a batch does."""
    for attempt in range(50):
        ask(server, [other, attempt + 3] * BLOCK)
        # Whatever was on its way comes before what the test is about.
        if seen := list(router.waiting(200)):
            return seen[-1][1]
    pytest.fail("nothing is published")


@pytest.mark.parametrize("numbers", [True, False])
def test_what_is_stored_has_vllms_hashes(numbers):
    port = free_port()
    variables = {} if numbers else {"VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES": "0"}
    shown = short if numbers else bytes
    with publishing(endpoint=f"tcp://*:{port}", topic="kv@tiny", variables=variables) as server:
        router = Subscriber(f"tcp://127.0.0.1:{port}", "kv@")
        last = listening(server, router, 260)
        ask(server, PROMPT)
        topic, sequence, batch = router.next()
        assert (topic, sequence, batch.data_parallel_rank) == ("kv@tiny", last + 1, 0)
        assert abs(batch.ts - time.time()) < 60
        [event] = batch.events
        assert event.block_hashes == [shown(digest) for digest in chain(PROMPT)]
        assert (event.parent_block_hash, event.block_size, event.medium) == (None, BLOCK, "GPU")
        assert event.token_ids == PROMPT[:96]
        # The same again stores nothing; what goes on from there names its parent.
        ask(server, PROMPT)
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
        router = Subscriber(f"tcp://127.0.0.1:{port}")
        listening(server, router, 260)
        ask(server, PROMPT, cache_salt="tenant-1")
        [event] = router.next()[2].events
        assert event.block_hashes == [short(digest) for digest in chain(PROMPT, "0", "tenant-1")]
        assert event.extra_keys == [(["cache_salt", "tenant-1"],)] + [None] * 5
        router.close()


def test_what_is_evicted_is_removed():
    port = free_port()
    with publishing("--num-gpu-blocks-override", "17", "--max-model-len", "128", endpoint=f"tcp://*:{port}") as server:
        router = Subscriber(f"tcp://127.0.0.1:{port}")
        listening(server, router, 260)
        ask(server, PROMPT)
        known = set()
        for first in range(3, 30):
            ask(server, [first, first + 1] * 48)
        seen = [event for _, _, batch in router.waiting(500) for event in batch.events]
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
        until("as many as are kept", lambda: [sequence for sequence, _ in replayed(0)] == [2, 3, 4])
        [(sequence, batch)] = replayed(4)
        assert (sequence, batch.events[0].token_ids) == (4, [204] * 16)
        assert replayed(5) == []
        socket.close(linger=0)


def test_a_router_may_listen_and_older_ones_read_arrays():
    port = free_port()
    router = Subscriber(f"tcp://127.0.0.1:{port}", batch=OldBatch, bind=True)
    with publishing(endpoint=f"tcp://127.0.0.1:{port}", encoding="array") as server:
        listening(server, router, 260)
        ask(server, PROMPT)
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
        router = Subscriber(f"tcp://127.0.0.1:{port}")
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
        ask(server, PROMPT)
        with sockets.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", port)) != 0
