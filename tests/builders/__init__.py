"""Engines without a model: vLLM's real scheduler and our real connector on a model of memory.

Real are vLLM's ``Scheduler``, ``AsyncScheduler`` and ``KVCacheManager``, both sides of our
connector, and vLLM's NIXL worker under ours. Not real are the forward pass and the wire:

* Memory holds, for each slot, the chain value of the tokens whose KV lies there. A step reads
  every earlier slot of its requests through their block tables and writes its own, so a slot
  with other KV is noticed at its first use (:class:`WrongKV`), and wrong KV makes wrong KV.
* The wire copies half blocks in any order, at any time, and stops, fails or lingers as the
  test says.

Steps are scheduled, executed and processed one by one, two in flight with ``AsyncScheduler``.
Every vLLM name that the tests need beside the connector's own is in this package.
"""

from __future__ import annotations

# First: it sets what vLLM reads when it is imported.
from tests.builders.configuration import BLOCK, VOCAB, kv_cache_config, make_config, model_folder  # isort: skip
from tests.builders.connectors import ClockedRetention, Sibling, SiblingLoads, WiredConnector
from tests.builders.content import NOTHING, Memory, Text, WrongKV, tokens
from tests.builders.engines import Engine, Flight, World
from tests.builders.helpers import Conversation, pair, reading, world
from tests.builders.host import HostCopies
from tests.builders.peers import DirectPeers, Question
from tests.builders.wire import Transfer, Wire, WiredWorker

__all__ = [
    "BLOCK",
    "NOTHING",
    "VOCAB",
    "ClockedRetention",
    "Conversation",
    "DirectPeers",
    "Engine",
    "Flight",
    "HostCopies",
    "Memory",
    "Question",
    "Sibling",
    "SiblingLoads",
    "Text",
    "Transfer",
    "Wire",
    "WiredConnector",
    "WiredWorker",
    "World",
    "WrongKV",
    "kv_cache_config",
    "make_config",
    "model_folder",
    "pair",
    "reading",
    "tokens",
    "world",
]
