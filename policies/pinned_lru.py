"""LRU beside a pinned share: the most used keys of each layer stay, the rest of the slots is LRU.

Every `interval` tokens share x slots / layers keys of each layer are pinned by their uses so far,
which are then halved. A pinned key is uploaded at its next miss, like any other. Present members
stay; if all others are pinned, the least recent pinned key leaves.
"""

from typing import NamedTuple

from simlab.policy.pins import (
    INTERVAL,
    Pins,
    new_pins,
    pins_step,
    pins_uses,
    pins_victim,
    settle,
)
from simlab.policy.protocol import Param
from simlab.policy.queues import NOWHERE, put

NAME = "pinned-lru"
VERSION = 1
SOURCE = "simlab; hot experts in fast memory: Fiddler, arXiv 2402.07033 (2024)"
PARAMS = {
    "share": Param(0.5, low=0, high=1, doc="share of the slots for pinned keys"),
    "interval": INTERVAL,
}


class State(NamedTuple):
    pins: Pins


def init(geometry, slots, params):
    hot = int(slots * params["share"]) // geometry.layers
    return State(new_pins(geometry.keys, int(params["interval"]), hot))


def on_step(state, cache, group, tokens):
    pins_step(state.pins, group, tokens)


def on_set(state, cache, group, layer, experts):
    pins_uses(state.pins, group, layer, experts)


def on_hit(state, cache, group, key):
    settle(state.pins, group, key, True)


def victim(state, cache, group, key):
    return pins_victim(state.pins, cache, group)


def on_evict(state, cache, group, key):
    put(state.pins.resident, group, key, NOWHERE)


def on_insert(state, cache, group, key):
    settle(state.pins, group, key, True)
