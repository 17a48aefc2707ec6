"""Many cells: policies x sizes x concurrency levels, laid out and replayed two at a time."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import CancelledError, ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from simlab.errors import UsageError
from simlab.model.budget import MIB, slots_for_budget
from simlab.policy.loader import Policy
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.compile import compile_policy, is_compiled
from simlab.replay.run import Replayer
from simlab.replay.sizes import Size
from simlab.result.schema import Result

_MOST_MIB = 2.0**40
T = TypeVar("T")


def cells_for(
    replayer: Replayer,
    policies: Sequence[Policy],
    *,
    sizes: Sequence[Size] = (),
    mib: Sequence[float] = (),
    split: Sequence[float] | None = None,
    concurrency: Sequence[int] = (1,),
    params: dict[str, float] | None = None,
) -> list[Cell]:
    """All combinations, ordered by concurrency, policy, size.

    Args:
        sizes: slots per group, or shares of a group's keys (``bmoe``: of all bytes).
        mib: budgets, as llama.cpp's --moe-cache-mib (``bmoe``: of the one pool).
        split: share of each device of the layout, for the budgets.
        params: parameter values, given to every policy that has them.

    Raises:
        UsageError: a size is impossible, or a parameter is known to no policy. SimlabError: a
            budget caches no group.
    """
    given = params or {}
    for name in given:
        if not any(name in policy.params for policy in policies):
            policies[0].values({name: given[name]})  # raises, naming what there is
    pools = [_pool(replayer, size) for size in sizes] + [_budget(replayer, m, split) for m in mib]
    cells = []
    for lanes in concurrency:
        for policy in policies:
            own = {name: value for name, value in given.items() if name in policy.params}
            policy.values(own)
            for slots, budget, notes in pools:
                cells.append(Cell(policy, slots, budget, lanes, own, notes))
    return cells


_Pool = tuple[tuple[int, ...], int | None, tuple[str, ...]]


def _pool(replayer: Replayer, size: Size) -> _Pool:
    if replayer.semantics == "bmoe":
        if size.share is None:
            raise UsageError(
                "bmoe's pool is in bytes: give --moe-cache-mib, or --slots as a share (25%)"
            )
        assert replayer.layer_bytes is not None
        total = sum(replayer.layer_bytes) * replayer.layout.n_expert
        return (), max(1, int(total * size.share)), ()
    slots, notes = size.slots(replayer.layout)
    return tuple(slots), None, tuple(notes)


def _budget(replayer: Replayer, mib: float, split: Sequence[float] | None) -> _Pool:
    if not 0 < mib <= _MOST_MIB:
        raise UsageError(f"--moe-cache-mib must be above 0 and at most {_MOST_MIB:g}, not {mib:g}")
    if replayer.semantics == "bmoe":
        return (), int(mib * MIB), ()
    if replayer.semantics == "sglang":
        raise UsageError("SGLang's pools are counted in experts a layer: give --slots")
    slots, notes = slots_for_budget(replayer.layout, mib, split)
    return tuple(slots), None, tuple(notes)


def replay_grid(
    replayer: Replayer,
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Result]:
    """Replay cells on ``jobs`` threads (the kernel releases the GIL); results in the cells' order.

    Args:
        progress: called with the number of access sets done since the last call.
    """
    return over_cells(replayer.run, replayer, cells, jobs=jobs, progress=progress)


def over_cells(
    work: Callable[[Cell, Callable[[int], None] | None], T],
    replayer: Replayer,
    cells: Sequence[Cell],
    *,
    jobs: int = 1,
    progress: Callable[[int], None] | None = None,
) -> Iterator[T]:
    """What ``work`` finds of each cell, as replay_grid; it passes the progress on to the replay."""
    compile_all([cell.policy for cell in cells], replayer.semantics == "bmoe", jobs)
    yield from side_by_side([partial(work, cell) for cell in cells], jobs, progress)


def side_by_side(
    tasks: Sequence[Callable[[Callable[[int], None] | None], T]],
    jobs: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[T]:
    """Run tasks on ``jobs`` threads, begun in their order; results in that order.

    Args:
        tasks: each is called with a function to tell of progress.
    """
    if jobs <= 1:
        for task in tasks:
            yield task(progress)
        return
    stopped = threading.Event()

    def advance(done: int) -> None:
        if stopped.is_set():
            raise CancelledError
        if progress is not None:
            progress(done)

    threads = ThreadPoolExecutor(jobs)
    waiting = [threads.submit(task, advance) for task in tasks]
    try:
        for future in waiting:
            yield future.result()
    finally:
        # an error or Ctrl-C: cells under way end at their next chunk; who waits for them is the
        # caller's affair, for a policy may loop for ever
        stopped.set()
        threads.shutdown(wait=False, cancel_futures=True)


def compile_all(policies: Sequence[Policy], batches: bool, jobs: int) -> None:
    """Make the policies' kernels ready; several of one policy count once.

    numba compiles one function at a time per process: new policies go to several processes,
    which leave their machine code in the cache folder.
    """
    policies = list({policy.module_name: policy for policy in policies}.values())
    new = [policy for policy in policies if not is_compiled(policy, batches=batches)]
    if jobs > 1 and len(new) > 1:
        spawn = multiprocessing.get_context("spawn")
        with ProcessPoolExecutor(min(jobs, len(new)), mp_context=spawn) as processes:
            # errors come again below, in this process, with their own type
            list(processes.map(_compile_quietly, [str(p.path) for p in new], [batches] * len(new)))
    for policy in policies:
        compile_policy(policy, batches=batches)


def _compile_quietly(path: str, batches: bool) -> None:
    try:
        compile_policy(load_policy(path), batches=batches)
    except Exception:
        return
