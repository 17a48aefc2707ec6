"""Which tokens are computed together: requests, C lanes, prefill, and the steps that result.

``lanes``: requests wait in trace order. At the start of each step idle lanes, in index order, take
waiting requests; each such prompt is prefilled at once, in steps of up to ``ubatch`` tokens, while
other lanes wait; a request without decode tokens frees its lane at once. Then every busy lane gives
its next decode token in one step, in lane order. ``recorded``: the steps that the trace recorded.

Source: DESIGN.md, Schedule; llama.cpp's server fills idle slots, prefills, then decodes all slots
in one batch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from simlab.errors import UsageError
from simlab.policy.jit import cached_jit
from simlab.trace.schema import DECODE, PREFILL, Trace

SCHEDULES = ("lanes", "recorded")
PREFILL_MODES = ("engine", "skip")
DEFAULT_UBATCH = 512
MOST_DRAFTED = 64


@dataclass(frozen=True, eq=False)
class Tokens:
    """The distinct (request, token) pairs of a trace, in trace order. N tokens.

    Attributes:
        row_start: int64 [N + 1]; rows of token i are ``row_start[i]`` up to ``row_start[i + 1]``.
        request: int32 [N], index of the token's request in ``request_ids``.
        phase: uint8 [N].
        request_ids: int32 [requests], the trace's request numbers, ascending.
    """

    row_start: npt.NDArray[np.int64]
    request: npt.NDArray[np.int32]
    phase: npt.NDArray[np.uint8]
    request_ids: npt.NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Schedule:
    """Steps: step s computes ``token[offsets[s]:offsets[s + 1]]`` together, in lane order. S steps.

    Attributes:
        offsets: int64 [S + 1]. token: int64 [tokens of the run], indices into Tokens.
        phase: uint8 [S], PREFILL or DECODE (recorded steps: DECODE when any token is).
        busy_lanes: mean number of lanes in decode steps (0 without one).
        produced: decode tokens that the run produces, where its steps verify drafted ones too.
    """

    offsets: npt.NDArray[np.int64]
    token: npt.NDArray[np.int64]
    phase: npt.NDArray[np.uint8]
    busy_lanes: float
    produced: int | None = None

    @property
    def n_steps(self) -> int:
        """Number of steps."""
        return len(self.phase)

    def part(self, first: int, n: int) -> Schedule:
        """``n`` steps from step ``first`` on."""
        offsets = self.offsets[first : first + n + 1]
        token = self.token[offsets[0] : offsets[-1]]
        return _schedule(np.diff(offsets), token, self.phase[first : first + n])


def tokens_of(trace: Trace) -> Tokens:
    """Find the tokens of a trace: runs of rows with equal (request, token)."""
    new = np.empty(trace.n_rows, np.bool_)
    new[0] = True
    np.not_equal(trace.token[1:], trace.token[:-1], out=new[1:])
    new[1:] |= trace.request[1:] != trace.request[:-1]
    first = np.flatnonzero(new)
    request_ids, request = np.unique(trace.request[first], return_inverse=True)
    return Tokens(
        row_start=np.append(first, trace.n_rows).astype(np.int64),
        request=request.astype(np.int32),
        phase=trace.phase[first],
        request_ids=request_ids.astype(np.int32),
    )


def build_schedule(
    trace: Trace,
    tokens: Tokens,
    *,
    concurrency: int = 1,
    prefill: str = "engine",
    ubatch: int = DEFAULT_UBATCH,
    schedule: str = "lanes",
    draft: int = 0,
    acceptance: float = 1.0,
    seed: int = 0,
) -> Schedule:
    """The steps of a run.

    Args:
        concurrency: C, number of lanes (ignored by ``recorded``).
        prefill: ``engine`` computes prompts, ``skip`` leaves prefill rows out.
        ubatch: most tokens of a prefill step.
        draft: tokens of each lane that a decode step verifies beside its next one: the text's next
            tokens, as a trace has no others. acceptance: chance that a drafted token is accepted if
            those before it were; drawn with ``seed``. What was not accepted is computed again.

    Raises:
        UsageError: a value is not allowed, the trace recorded no steps, or nothing is left to run.
    """
    if schedule not in SCHEDULES:
        raise UsageError(f"--schedule must be one of {', '.join(SCHEDULES)}, not {schedule!r}")
    if prefill not in PREFILL_MODES:
        raise UsageError(f"--prefill must be one of {', '.join(PREFILL_MODES)}, not {prefill!r}")
    if concurrency < 1 or ubatch < 1:
        raise UsageError("--concurrency and --ubatch must be 1 or more")
    if not 0 <= draft <= MOST_DRAFTED or not 0 <= acceptance <= 1:
        raise UsageError(f"--draft takes 0 to {MOST_DRAFTED} tokens, --acceptance 0 to 1")
    if draft and schedule == "recorded":
        raise UsageError("--schedule recorded replays the trace's own steps: leave out --draft")
    ubatch = min(ubatch, len(tokens.phase))
    chosen = np.arange(len(tokens.phase))
    if prefill == "skip":
        chosen = np.flatnonzero(tokens.phase == DECODE)
    if len(chosen) == 0:
        raise UsageError("the trace holds prefill tokens only: leave out --prefill skip")
    if schedule == "recorded":
        return _recorded(trace, tokens, chosen)
    request = tokens.request[chosen]
    first = np.flatnonzero(np.append(True, request[1:] != request[:-1]))
    last = np.append(first[1:], len(chosen))
    lanes = min(concurrency, len(first))
    accepted = accepted_drafts(len(chosen), draft, acceptance, seed)
    size, order, phase, busy = _run_lanes(
        first, last, tokens.phase[chosen], lanes, ubatch, draft, accepted
    )
    made = _schedule(size, chosen[order], phase)
    if not draft:
        return made
    decode_steps = int((phase == DECODE).sum())
    return replace(
        made,
        busy_lanes=busy / decode_steps if decode_steps else 0.0,
        produced=int((tokens.phase[chosen] == DECODE).sum()),
    )


def accepted_drafts(count: int, draft: int, acceptance: float, seed: int) -> npt.NDArray[np.int64]:
    """Drafted tokens accepted in a row, 0 to ``draft``, for ``count`` verifications: int64."""
    if not draft or acceptance == 1:
        return np.full(count, draft, np.int64)
    rng = np.random.default_rng(seed & (2**64 - 1))
    return np.minimum(rng.geometric(1 - acceptance, count) - 1, draft).astype(np.int64)


def _recorded(trace: Trace, tokens: Tokens, chosen: npt.NDArray[Any]) -> Schedule:
    if trace.step is None:
        raise UsageError("the trace recorded no steps: use --schedule lanes")
    step = trace.step[tokens.row_start[chosen]]
    order = np.argsort(step, kind="stable")
    step = step[order]
    first = np.flatnonzero(np.append(True, step[1:] != step[:-1]))
    size = np.diff(np.append(first, len(step)))
    phase = np.maximum.reduceat(tokens.phase[chosen[order]], first)
    return _schedule(size, chosen[order], phase)


def _schedule(size: npt.NDArray[Any], token: npt.NDArray[Any], phase: npt.NDArray[Any]) -> Schedule:
    decode = size[phase == DECODE]
    return Schedule(
        offsets=np.concatenate(([0], np.cumsum(size))).astype(np.int64),
        token=token.astype(np.int64),
        phase=phase.astype(np.uint8),
        busy_lanes=float(decode.mean()) if len(decode) else 0.0,
    )


@cached_jit()
def _run_lanes(
    first: Any, last: Any, phase: Any, n_lanes: int, ubatch: int, draft: int, accepted: Any
) -> Any:
    """Walk the lanes. Returns step sizes, tokens in step order, step phases, and the number of
    (lane, decode step) pairs.

    Args:
        first, last: int64 [requests], each request's span of tokens.
        phase: uint8 [tokens].
        accepted: int64 [tokens], drafted tokens accepted in the i-th verification.
    """
    n = len(phase)
    size = np.zeros(n, np.int64)
    step_phase = np.zeros(n, np.uint8)
    order = np.zeros(n * (draft + 1), np.int64)
    at = np.zeros(n_lanes, np.int64)  # next token of a lane; at == end means idle
    end = np.zeros(n_lanes, np.int64)
    waiting = 0
    steps = 0
    done = 0
    given = 0  # tokens that need no further step
    busy = 0
    while given < n:
        for lane in range(n_lanes):
            while True:
                if at[lane] == end[lane]:
                    if waiting == len(first):
                        break
                    at[lane] = first[waiting]
                    end[lane] = last[waiting]
                    waiting += 1
                # a prompt, or a later turn's prompt in the middle of a request
                while at[lane] < end[lane] and phase[at[lane]] == PREFILL:
                    count = 0
                    while count < ubatch and at[lane] < end[lane] and phase[at[lane]] == PREFILL:
                        order[done] = at[lane]
                        at[lane] += 1
                        done += 1
                        count += 1
                    given += count
                    size[steps] = count
                    step_phase[steps] = PREFILL
                    steps += 1
                if at[lane] < end[lane]:
                    break
        count = 0
        for lane in range(n_lanes):
            if at[lane] < end[lane]:
                verified = 0
                while (
                    verified <= draft
                    and at[lane] + verified < end[lane]
                    and phase[at[lane] + verified] == DECODE
                ):
                    order[done] = at[lane] + verified
                    done += 1
                    verified += 1
                advance = min(1 + accepted[busy], verified)
                at[lane] += advance
                given += advance
                count += verified
                busy += 1
        if count:
            size[steps] = count
            step_phase[steps] = DECODE
            steps += 1
    return size[:steps], order[:done], step_phase[:steps], busy
