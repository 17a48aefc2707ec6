"""Pin by frequency, re-pin now and then, decline all else: the policy of the "33 times the traffic"
comparison.

Every `interval` tokens the `hot` most used keys of each layer are pinned (uses so far, then halved;
0: as many as the slots hold). Only pinned keys are uploaded, each at its next miss, in place of the
least recent key that is not pinned; all other misses are declined. Until the first re-pin empty
slots are filled by whoever comes. Present members stay. Needs an engine that can decline.
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

NAME = "repin"
VERSION = 1
SOURCE = "simlab; popular experts in fast memory: Fiddler, arXiv 2402.07033 (2024)"
PARAMS = {
    "interval": INTERVAL,
    "hot": Param(0, low=0, high=65536, doc="keys pinned a layer; 0: slots / layers"),
}
DECLINES = True


class State(NamedTuple):
    pins: Pins


def init(geometry, slots, params):
    most = slots // geometry.layers
    hot = min(int(params["hot"]) or most, most)
    return State(new_pins(geometry.keys, int(params["interval"]), hot))


def on_step(state, cache, group, tokens):
    pins_step(state.pins, group, tokens)


def on_set(state, cache, group, layer, experts):
    pins_uses(state.pins, group, layer, experts)


def on_hit(state, cache, group, key):
    settle(state.pins, group, key, True)


def victim(state, cache, group, key):
    return pins_victim(state.pins, cache, group)


def admit(state, cache, group, key, victim):
    return victim < 0 or (state.pins.pinned[key] and not state.pins.pinned[victim])


def on_evict(state, cache, group, key):
    put(state.pins.resident, group, key, NOWHERE)


def on_insert(state, cache, group, key):
    settle(state.pins, group, key, True)
