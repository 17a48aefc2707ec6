"""The most hits that any policy could have, less what its uploads cost: a min-cost flow.

As many units as the pool has slots flow through time, one node an access set. A unit leaves the
line of time to hold a key from one of its lookups to the next, which earns a hit; entering costs an
upload, unless the unit comes from holding the same key before. What is not held is declined. Every
policy's run is such a flow (what it uploads in vain only costs), so none gets beyond the optimum.

The network is solved by OR-tools (cost scaling: Goldberg 1997), in whole numbers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from simlab.errors import SimlabError, UsageError

#: A hit's worth in the network's whole numbers.
SCALE = 1000


def need_solver() -> None:
    """Raise UsageError, saying what to install, unless OR-tools is there."""
    try:
        import ortools.graph.python.min_cost_flow  # noqa: F401
    except ImportError:
        raise UsageError(
            "the frontier needs OR-tools: pip install 'simlab[frontier]' (or: pip install ortools)"
        ) from None


@dataclass(frozen=True, eq=False)
class Uses:
    """The lookups of one pool in a window, n of them.

    Attributes:
        time: int64 [n], the access set of each, counted from 0 and ascending.
        previous: int64 [n], index of the key's last lookup in the window, or -1.
        slots: of the pool.
    """

    time: npt.NDArray[np.int64]
    previous: npt.NDArray[np.int64]
    slots: int


def best_of(uses: Uses, worth: int, cost: int) -> tuple[int, int]:
    """Hits and uploads of a run with the highest ``worth x hits - cost x uploads``.

    Args:
        worth: of a hit, above 0. cost: of an upload, above 0, so that none is made in vain.
    """
    from ortools.graph.python.min_cost_flow import SimpleMinCostFlow

    later = np.flatnonzero(uses.previous >= 0)  # lookups that can hit
    if not len(later):
        return 0, 0
    earlier = uses.previous[later]
    n_times = int(uses.time[-1]) + 1
    node = n_times + np.arange(len(uses.time))
    line = np.arange(n_times - 1)
    tails = np.concatenate([line, uses.time[earlier], node[earlier], node[later]])
    heads = np.concatenate([line + 1, node[earlier], node[later], uses.time[later]])
    many = len(later)
    capacity = np.concatenate([np.full(n_times - 1, uses.slots), np.ones(3 * many, np.int64)])
    costs = np.zeros(len(tails), np.int64)
    uploads = np.arange(n_times - 1, n_times - 1 + many)
    hits = uploads + many
    costs[uploads], costs[hits] = cost, -worth
    network = SimpleMinCostFlow()
    arcs = network.add_arcs_with_capacity_and_unit_cost(tails, heads, capacity, costs)
    network.set_node_supply(0, uses.slots)
    network.set_node_supply(n_times - 1, -uses.slots)
    if network.solve() != network.OPTIMAL:
        raise SimlabError("OR-tools could not solve the frontier's network: take smaller windows")
    return int(network.flows(arcs[hits]).sum()), int(network.flows(arcs[uploads]).sum())


def scaled_costs(mu: float, weights: Sequence[float], n_lookups: int) -> tuple[int, list[int]]:
    """A hit's worth and an upload's cost in each pool, as whole numbers.

    Args:
        mu: hits that a mean upload has to earn; 0: the fewest uploads among the most hits.
        weights: bytes of each pool's experts over their mean. n_lookups: of the window.
    """
    if mu == 0:  # all uploads together cost less than one hit
        whole = [max(1, round(SCALE * weight)) for weight in weights]
        return max(whole) * (n_lookups + 1), whole
    return SCALE, [max(1, round(SCALE * mu * weight)) for weight in weights]
