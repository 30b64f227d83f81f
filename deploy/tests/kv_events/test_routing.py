"""Two replicas behind a picker that follows their KV events: what a router that looks for prefixes gains by them.

The picker does what the precise prefix scorer of the Gateway API inference extension does: it keeps which replica has which
block, hashes a prompt's blocks itself, and sends it where the longest run of them is."""

import contextlib
import json

from places import free_port
from processes import get, until
from subscriber import BLOCK, BlockStored, Subscriber, ask, chain, publishing, short

# Prompts of six tenants, each with ten blocks of its own in front. One replica has room for three of them.
TENANTS = 6
PREFIX = 10 * BLOCK
ROUNDS = 6
BLOCKS = 45


def prompt(tenant, question):
    return [3 + tenant] * PREFIX + [20 + question, 40 + tenant] * 4


def hits(server):
    """Prompt tokens that the prefix cache had."""
    return server.metric("vllm:prefix_cache_hits_total")


class RoundRobin:
    def __init__(self, replicas):
        self.replicas, self.turn = replicas, 0

    def pick(self, tokens):
        self.turn += 1
        return self.turn % len(self.replicas)

    def knows(self, index, tokens):
        """Whether it has been told what the replica keeps of a prompt that it has answered; nobody tells this one."""
        return True


class Picker(RoundRobin):
    """Where the longest prefix is; where there is none, whose turn it is."""

    def __init__(self, replicas):
        super().__init__(replicas)
        # A router knows the replicas' addresses, and no more: each says where it publishes.
        (sources,) = zip(*(json.loads(get(f"{replica.url}/kv_event_sources")[1]) for replica in replicas))
        assert all(source["block_size"] == BLOCK for source in sources)
        self.subscribers = [Subscriber(source["endpoint"], source["topic"]) for source in sources]
        self.known = [set() for _ in replicas]

    def follow(self):
        for subscriber, known in zip(self.subscribers, self.known):
            for _, _, batch in subscriber.waiting():
                for event in batch.events:
                    if isinstance(event, BlockStored):
                        known.update(event.block_hashes)
                    else:
                        known.difference_update(event.block_hashes)

    def pick(self, tokens):
        self.follow()
        hashes = [short(digest) for digest in chain(tokens)]
        lengths = [next((i for i, digest in enumerate(hashes) if digest not in known), len(hashes)) for known in self.known]
        longest = max(lengths)
        return lengths.index(longest) if longest else super().pick(tokens)

    def knows(self, index, tokens):
        self.follow()
        return short(chain(tokens)[0]) in self.known[index]

    def subscribed(self):
        """A subscription takes a moment to arrive: requests until a batch of each replica does."""
        for replica, known in zip(self.replicas, self.known):
            attempts = iter(range(3, 200))

            def heard():
                ask(replica, [250, next(attempts)] * BLOCK)
                self.follow()
                return known

            until("something is published", heard)

    def close(self):
        for subscriber in self.subscribers:
            subscriber.close()


@contextlib.contextmanager
def two_replicas():
    flags = ["--num-gpu-blocks-override", str(BLOCKS), "--max-model-len", "256"]
    with contextlib.ExitStack() as stack:
        places = [{"endpoint": f"tcp://*:{free_port()}", "topic": f"kv@replica-{number}@tiny"} for number in range(2)]
        yield [stack.enter_context(publishing(*flags, **place)) for place in places]


def shares_of_prefixes_found(replicas, picker):
    """Round by round, of the tokens of the prefixes."""
    for question in range(ROUNDS):
        before = sum(map(hits, replicas))
        for tenant in range(TENANTS):
            tokens = prompt(tenant, question)
            index = picker.pick(tokens)
            ask(replicas[index], tokens)
            # An answer may be there a moment before its blocks are told.
            until("its blocks are told", lambda: picker.knows(index, tokens))
        yield (sum(map(hits, replicas)) - before) / (TENANTS * PREFIX)


def test_prompts_go_where_their_prefix_is():
    with two_replicas() as replicas:
        picker = Picker(replicas)
        picker.subscribed()
        _, *shares = shares_of_prefixes_found(replicas, picker)
        assert sum(shares) / len(shares) > 0.95
        # Each tenant's blocks are on one replica alone.
        picker.follow()
        for tenant in range(TENANTS):
            first = short(chain(prompt(tenant, 0))[0])
            assert sum(first in known for known in picker.known) == 1
        picker.close()


def test_without_the_events_each_replica_sees_them_all_and_keeps_none():
    with two_replicas() as replicas:
        # An odd number of turns in a round, so that a tenant does not stay with a replica by chance.
        picker = RoundRobin(replicas)
        for share in shares_of_prefixes_found(replicas, picker):
            picker.turn += 1
            assert share < 0.5
