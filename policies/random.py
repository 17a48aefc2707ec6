"""Random replacement: any resident key outside the present set, each with the same chance.

Not a joke baseline: below one cycle T it beats LRU, whose order inside the layer cycle is exactly
wrong. Draws that name a present member are repeated. Seeded by --seed.
"""

from typing import NamedTuple

from simlab.policy.sampling import Residents, draw_absent, enter, leave, new_residents

NAME = "random"
VERSION = 1
SOURCE = "Belady 1966, A study of replacement algorithms for a virtual-storage computer"


class State(NamedTuple):
    residents: Residents


def init(geometry, slots, params):
    return State(residents=new_residents(geometry.keys, geometry.seed))


def victim(state, cache, group, key):
    return draw_absent(state.residents, cache)


def on_evict(state, cache, group, key):
    leave(state.residents, key)


def on_insert(state, cache, group, key):
    enter(state.residents, key)
