"""A search over a policy's parameters: a coarse grid, then one coordinate after the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from simlab.errors import UsageError
from simlab.policy.loader import Policy
from simlab.policy.protocol import Param

#: Share of the budget that the coarse grid may take.
_COARSE = 0.6
#: Steps of the refinement: factors of positive numbers, and parts of a range that lies within 0..1.
_FACTORS = (2.0, 2**0.5, 2**0.25)
_PARTS = (0.1, 0.05, 0.025)

#: Parameter values by name.
Values = dict[str, float]
#: What a search minimises: compared as a tuple.
Score = tuple[float, float]


def coarse_values(param: Param) -> list[float]:
    """Values of one parameter that cover its range roughly, its default among them.

    A range within 0..1 is a share. Otherwise factors of 4 around the default, and 0 where the range
    has it. A default that is a Python integer makes a whole number of the parameter.
    """
    default, whole = float(param.default), isinstance(param.default, int)
    if _is_share(param):
        found = [param.low + (param.high - param.low) * x for x in (0.02, 0.1, 0.3, 0.6, 0.9)]
    elif default == 0:
        found = [float(4**i) for i in range(5)] if whole else [0.01, 0.1, 1.0, 10.0]
        found += [-x for x in found]
    else:
        found = [default * 4.0**i for i in (-2, -1, 1, 2)] + [0.0] * (param.low <= 0 <= param.high)
    found = [min(max(round(x) if whole else x, param.low), param.high) for x in found]
    return sorted({default, *map(float, found)})


def _is_share(param: Param) -> bool:
    return 0 <= param.low < param.high <= 1 and not isinstance(param.default, int)


def _neighbours(param: Param, value: float, level: int) -> list[float]:
    """The values beside one, nearer from level to level."""
    if _is_share(param):
        part = (param.high - param.low) * _PARTS[level]
        near = [value - part, value + part]
    elif value == 0:
        size = abs(param.default) or 1.0
        near = [-size / 4 / _FACTORS[level], size / 4 / _FACTORS[level]]
    else:
        near = sorted((value / _FACTORS[level], value * _FACTORS[level]))
    if isinstance(param.default, int):
        near = [min(math.floor(near[0]), value - 1), max(math.ceil(near[1]), value + 1)]
    return [float(min(max(x, param.low), param.high)) for x in near]


@dataclass(frozen=True)
class Space:
    """What is searched: ``grids`` holds the coarse values of each free parameter.

    ``listed``: parameters whose values the user listed; no others are tried. ``fixed``: given.
    """

    policy: Policy
    grids: Mapping[str, Sequence[float]]
    listed: frozenset[str]
    fixed: Mapping[str, float]


def space_of(
    policy: Policy, fixed: Mapping[str, float], tried: Mapping[str, Sequence[float]]
) -> Space:
    """The search space of a policy.

    Args:
        fixed: values that are not searched. tried: parameter -> the values to try.

    Raises:
        UsageError: a parameter is unknown, out of range or named twice, or none is left to tune.
    """
    policy.values(fixed)
    for name, values in tried.items():
        for value in values:
            policy.values({name: value})
        if name in fixed:
            raise UsageError(f"give --param {name} or --try {name}, not both")
    if not policy.params:
        raise UsageError(f"policy {policy.name} has no parameter to tune")
    free = [name for name in policy.params if name not in fixed]
    if not free:
        raise UsageError(f"every parameter of {policy.name} is given: nothing is left to tune")
    grids = {
        name: sorted(set(map(float, tried[name])))
        if name in tried
        else coarse_values(policy.params[name])
        for name in free
    }
    return Space(policy, grids, frozenset(tried), dict(fixed))


def search(
    space: Space,
    evaluate: Callable[[Sequence[Values]], Sequence[Score]],
    *,
    budget: int,
    seed: int = 0,
) -> list[tuple[Values, Score]]:
    """Try parameter values, at most ``budget`` of them; all that was tried, best first.

    The defaults come first, so they win where scores are equal. ``evaluate`` is given several at a
    time, which may run side by side: what is tried does not depend on how many do.
    """
    names = list(space.grids)
    tried: dict[tuple[float, ...], Score] = {}

    def attempt(points: Sequence[tuple[float, ...]]) -> None:
        new = list(dict.fromkeys(p for p in points if p not in tried))[: budget - len(tried)]
        values = [{**space.fixed, **dict(zip(names, p, strict=True))} for p in new]
        tried.update(zip(new, evaluate(values) if new else [], strict=True))

    attempt([tuple(_start(space, name) for name in names)])
    points = list(itertools.product(*space.grids.values())) if _size(space) <= 10**6 else []
    room = max(1, int(budget * _COARSE))
    rng = np.random.default_rng(seed & (2**64 - 1))
    if not points:
        points = [
            tuple(float(rng.choice(list(grid))) for grid in space.grids.values())
            for _ in range(room)
        ]
    elif len(points) > room:
        points = [points[i] for i in sorted(rng.permutation(len(points))[:room])]
    attempt(points)
    level = 0
    while level < len(_FACTORS) and len(tried) < budget:
        best = min(tried, key=lambda point: tried[point])
        near = [
            [value]
            if name in space.listed
            else [value, *_neighbours(space.policy.params[name], value, level)]
            for name, value in zip(names, best, strict=True)
        ]
        around = list(itertools.product(*near)) if len(near) <= 2 else []
        # with many parameters one at a time; a bound on the hit rate often asks for two at once
        around += [(*best[:i], v, *best[i + 1 :]) for i in range(len(names)) for v in near[i]]
        attempt(around)
        if min(tried, key=lambda point: tried[point]) == best:
            level += 1
    order = sorted(tried, key=lambda point: tried[point])
    return [({**space.fixed, **dict(zip(names, p, strict=True))}, tried[p]) for p in order]


def _start(space: Space, name: str) -> float:
    """The default, or of a listed parameter the value nearest to it."""
    default = float(space.policy.params[name].default)
    if name in space.listed:
        return min(space.grids[name], key=lambda value: abs(value - default))
    return default


def _size(space: Space) -> int:
    return math.prod(len(grid) for grid in space.grids.values())
