"""All twins by the name typed after --policy, and second parameter values to try them with."""

from __future__ import annotations

from naive_moe import MOE
from naive_policies import POLICIES as CORE
from naive_policies import Policy
from naive_queues import QUEUES
from naive_scores import SCORES

POLICIES: dict[str, type[Policy]] = {**CORE, **QUEUES, **SCORES, **MOE}

#: Fit for traces of a few dozen tokens and pools of a few dozen slots, unlike most defaults.
OTHER_PARAMS: dict[str, dict[str, float]] = {
    "lfu-decay": {"half_life": 3.0},
    "slru": {"protected": 0.5},
    "twoq": {"in_share": 0.4, "out_share": 0.8},
    "s3fifo": {"small": 0.4, "ghost": 0.5},
    "lirs": {"hir": 0.4},
    "lru-k": {"k": 3},
    "lrfu": {"half_life": 2.7},
    "lrfu-admit": {"half_life": 2.7, "margin": 0.4},
    "layer-lrfu": {"half_life": 0.9},
    "hyperbolic": {"sample": 3},
    "lecar": {"learning_rate": 2.0, "history": 1.0},
    "w-tinylfu": {"window": 0.4, "protected": 0.5},
    "heat-lru": {"uses": 1},
    "capped-lru": {"uploads": 1},
    "mix-admit": {"margin": 0.7},
    "mix-tr": {"lift": 2.0},
    "mix-trace": {"lift": 0.9, "memory": 2.5},
    "pinned-lru": {"share": 0.6, "interval": 3},
    "repin": {"interval": 4, "hot": 2},
    "router-ewma": {"half_life": 1.5},
}
