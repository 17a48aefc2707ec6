"""`mix-tr` whose experts vouch for more than the next token.

LRU's misses that OPT would have hit are keys that come back after a few tokens, not at the next
one. So each pick leaves a trace on its expert, halved at every `memory` visits of the layer, and
P(e next | i) is learned with the trace as weight: of all traces of i, the share that was there as e
was picked. The rest is `mix-tr`, with half-lives 4, 16, 64 and 256 visits. The lowest value leaves;
present members stay. No offline training, no knowledge of the future.
"""

from simlab.policy.lowest import left
from simlab.policy.protocol import Param
from simlab.policy.transitions import learn_visit, least_vouched_for, new_transitions

NAME = "mix-trace"
VERSION = 1
SOURCE = "simlab; decayed counts: LRFU, Lee et al. 2001; eligibility traces: Sutton 1988"

HALF_LIVES = (4.0, 16.0, 64.0, 256.0)
PARAMS = {
    "lift": Param(1.2, low=0, high=100, doc="weight of the mean log lift"),
    "memory": Param(1.0, low=0.01, high=1e6, doc="visits after which a trace is halved"),
}


def init(geometry, slots, params):
    return new_transitions(
        geometry.layers,
        geometry.experts,
        HALF_LIVES,
        lift=params["lift"],
        memory=2.0 ** (-1.0 / params["memory"]),
    )


def on_set(state, cache, group, layer, experts):
    learn_visit(state, group, layer, experts)


def victim(state, cache, group, key):
    return least_vouched_for(state, cache, group)


def on_evict(state, cache, group, key):
    left(state.mixture.lowest, group, key)
