"""KV events as a router reads them: with ZeroMQ's own library, vLLM's message types and its hashes."""

import contextlib
import hashlib
import json
from typing import Any

import cbor2
import msgspec
import zmq

from serving import serving

BLOCK = 16
WAIT = 10_000


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


class Subscriber:
    """Reads the batches of one server."""

    def __init__(self, address, topic="", batch=Batch, bind=False):
        self.socket = zmq.Context.instance().socket(zmq.SUB)
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT)
        self.socket.setsockopt_string(zmq.SUBSCRIBE, topic)
        self.socket.bind(address) if bind else self.socket.connect(address)
        self.decoder = msgspec.msgpack.Decoder(batch)

    def next(self):
        topic, sequence, payload = self.socket.recv_multipart()
        return topic.decode(), int.from_bytes(sequence, "big"), self.decoder.decode(payload)

    def waiting(self, patience=0):
        """The batches that are there, the last of them after so many milliseconds of silence."""
        self.socket.setsockopt(zmq.RCVTIMEO, patience)
        with contextlib.suppress(zmq.Again):
            while True:
                yield self.next()
        self.socket.setsockopt(zmq.RCVTIMEO, WAIT)

    def close(self):
        self.socket.close(linger=0)


@contextlib.contextmanager
def publishing(*flags, variables=None, **config):
    config = {"enable_kv_cache_events": True, "publisher": "zmq", **config}
    # A prompt is one step and one batch of events, however slow the machine is.
    flags = ("--block-size", str(BLOCK), "--max-step-ms", "0", *flags)
    with serving("--kv-events-config", json.dumps(config), *flags, **(variables or {})) as server:
        yield server


def ask(server, prompt, **more):
    status, text = server.ask({"prompt": prompt, "max_tokens": 1, "temperature": 0, **more})
    assert status == 200, text
