"""Generation with picks: batches, lanes and chunks against single runs; what a trace then says."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch", reason="capturing needs torch: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="capturing needs transformers")

import torch
from capture_cases import build, engine_run, loaded, prompts, table

from simlab.capture.engine import Settings
from simlab.capture.prompts import Prompt
from simlab.capture.run import capture
from simlab.capture.sampling import Sampling, choose, generator
from simlab.errors import SimlabError, UsageError
from simlab.replay.schedule import build_schedule, tokens_of
from simlab.trace.read import read_trace
from simlab.trace.schema import DECODE, PREFILL

MODELS = ["full", "sliding", "mla", "recurrent"]
TEXTS = prompts([9, 21, 3, 14, 1, 8])
NEW = 12
SAMPLED = Sampling(temperature=1.0, top_k=40, top_p=0.95)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


model_of = cache(build)


@cache
def single(name: str, sampling: Sampling, eos: tuple[int, ...]) -> Any:
    """Every request alone, in one prefill step, without padding."""
    settings = Settings(max_new_tokens=NEW, sampling=sampling, seed=3)
    ended, steps = engine_run(model_of(name), TEXTS, settings, eos)
    return {i: r.new for i, r in ended.items()}, table(steps)


@cache
def end_token(name: str, sampling: Sampling) -> int:
    """A token that ends some requests in the middle: one that a run without it generates."""
    new, _ = single(name, sampling, ())
    middle = Counter(t for tokens in new.values() for t in set(tokens[2:-2]) - {tokens[0]})
    return middle.most_common(1)[0][0]


@pytest.mark.parametrize("name", MODELS)
def test_the_loop_generates_what_transformers_generates(name: str) -> None:
    new, rows = single(name, Sampling(), ())
    for i, text in enumerate(TEXTS):
        wanted = model_of(name).generate(
            torch.tensor([text]), max_new_tokens=NEW, do_sample=False, eos_token_id=None,
            pad_token_id=0,
        )  # fmt: skip
        assert new[i] == wanted[0, len(text) :].tolist()
    # one row a token, the last generated one excepted; prompts are prefill
    assert {(i, t): phase for (i, t), (phase, _) in rows.items()} == {
        (i, t): PREFILL if t < len(text) else DECODE
        for i, text in enumerate(TEXTS)
        for t in range(len(text) + NEW - 1)
    }
    # the picks must be able to tell requests and positions apart
    assert len({str(picks) for _, picks in rows.values()}) > len(rows) / 2


WAYS = {
    "batch of 3": {"batch": 3},
    "batch of 3 in chunks": {"batch": 3, "prefill_chunk": 5},
    "chunks": {"prefill_chunk": 4},
    "3 lanes": {"concurrency": 3},
    "2 lanes in chunks": {"concurrency": 2, "prefill_chunk": 6},
}


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=str)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_rows_and_ids_are_those_of_single_runs(name: str, way: str, sampling: Sampling) -> None:
    eos = (end_token(name, sampling),)
    new, rows = single(name, sampling, eos)
    lengths = [len(new[i]) for i in range(len(TEXTS))]
    assert min(lengths) < NEW, "no request ended early"
    settings = Settings(max_new_tokens=NEW, sampling=sampling, seed=3, **WAYS[way])
    ended, steps = engine_run(model_of(name), TEXTS, settings, eos)
    assert {i: r.new for i, r in ended.items()} == new
    assert table(steps) == rows
    # nothing but real tokens was ever counted, and no step was empty
    assert sum(len(s.token) for s in steps) == sum(map(len, TEXTS)) + sum(lengths) - len(TEXTS)
    assert [s.step for s in steps] == list(range(len(steps)))
    assert min(len(s.token) for s in steps) > 0
    most = max(settings.batch, settings.concurrency)
    assert max((s.phase == DECODE).sum() for s in steps) == most if most > 1 else True


def test_what_is_drawn_belongs_to_the_request() -> None:
    """Another seed gives other text; the same request elsewhere in the list gives other text."""
    settings = Settings(max_new_tokens=NEW, sampling=SAMPLED, seed=3)
    new, _ = single("full", SAMPLED, ())
    other, _ = engine_run(
        model_of("full"), TEXTS[:1], Settings(max_new_tokens=NEW, sampling=SAMPLED, seed=4)
    )
    assert other[0].new != new[0]
    twice, _ = engine_run(model_of("full"), [TEXTS[0], TEXTS[0]], settings)
    assert twice[0].new == new[0] != twice[1].new


def test_settings_that_exclude_each_other_are_refused() -> None:
    for wrong in (
        {"batch": 2, "concurrency": 2},
        {"concurrency": 2, "teacher_forced": True},
        {"max_new_tokens": 0},
        {"prefill_chunk": 0},
        {"seed": -1},
    ):
        with pytest.raises(UsageError, match="--"):
            Settings(**wrong)
    for bad in ({"temperature": -1}, {"top_k": -1}, {"top_p": 0}, {"top_p": 1.5}):
        with pytest.raises(UsageError, match="--"):
            Sampling(**bad)


@pytest.mark.parametrize("top_k", [0, 3])
@pytest.mark.parametrize("top_p", [1.0, 0.6])
def test_draws_follow_the_distribution(top_k: int, top_p: float) -> None:
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0, 2.5], dtype=torch.float64)
    sampling = Sampling(temperature=1.5, top_k=top_k, top_p=top_p)
    p = np.exp(logits.numpy() / 1.5)
    order = np.argsort(-p)[: top_k or 5]
    kept, total = [], 0.0
    for i in order:  # the smallest set that reaches top_p
        if total < top_p * p[order].sum():
            kept.append(i)
            total += p[i]
    wanted = np.zeros(5)
    wanted[kept] = p[kept] / total
    n = 20_000
    one = generator(0, 0)
    drawn = choose(logits.expand(n, 5), sampling, [one] * n)
    found = np.bincount(drawn, minlength=5) / n
    assert np.abs(found - wanted).max() < 0.02
    assert set(np.flatnonzero(found)) == set(np.flatnonzero(wanted))


def run(out: Path, settings: Settings, *, texts: list[list[int]] = TEXTS, **options: Any) -> Any:
    asked = [
        Prompt(f"p{i}", " ".join(map(str, text)), tag="prose" if i % 2 else "")
        for i, text in enumerate(texts)
    ]
    return capture(loaded(model_of("full"), (1,)), asked, out, settings, **options)


def test_a_trace_says_where_it_is_from(tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=NEW, sampling=SAMPLED, seed=3)
    told: list[tuple[int, int]] = []
    planned: list[int] = []

    def watch(total: int) -> Any:
        planned.append(total)
        return lambda done, skipped: told.append((done, skipped))

    done = run(tmp_path / "t.parquet", settings, weights=True, source="a", command="b", watch=watch)
    trace = read_trace(tmp_path / "t.parquet", cache=False)
    new, rows = single("full", SAMPLED, (1,))
    meta = trace.meta
    assert meta == done.meta
    assert not meta.partial
    assert (meta.kind, meta.model, meta.source, meta.command) == (
        "captured", "tiny random model", "a", "b",
    )  # fmt: skip
    assert (meta.n_expert, meta.k, meta.moe_layers, meta.seed) == (8, 2, (0, 1, 2), 3)
    assert meta.tags == {"1": "prose", "3": "prose", "5": "prose"}
    assert meta.device.startswith("cpu")
    assert set(meta.versions) == {"simlab", "torch", "transformers", "python"}
    assert any("temperature 1, top-k 40, top-p 0.95" in note for note in meta.notes)
    assert any("float64" in note and "Words of 97" in note for note in meta.notes)
    # gate and up together, and down: 8 bytes a number
    assert meta.expert_bytes == ((2 * 16 * 32 * 8, 32 * 16 * 8),) * 3
    assert trace.weights is not None
    first, second = trace.weights.reshape(-1, 2).T
    assert (first >= second).all()
    assert len(np.unique(first)) > 50
    assert ((first + second <= 1.001) & (second > 0)).all()
    found: dict[tuple[int, int], tuple[int, list[list[int]]]] = {}
    for r in range(trace.n_rows):
        place = (int(trace.request[r]), int(trace.token[r]))
        picks = trace.experts[trace.offsets[r] : trace.offsets[r + 1]].tolist()
        found.setdefault(place, (int(trace.phase[r]), []))[1].append(picks)
    assert found == rows
    assert (done.requests, done.prompt_tokens) == (len(TEXTS), sum(map(len, TEXTS)))
    assert done.decode_tokens == sum(map(len, new.values())) - len(TEXTS)
    # the bar ends full
    assert planned == [sum(map(len, TEXTS)) + len(TEXTS) * (NEW - 1)]
    assert sum(d for d, _ in told) == len(rows)
    assert sum(d + s for d, s in told) == planned[0]


@pytest.mark.parametrize("way", ["3 lanes", "2 lanes in chunks", "chunks"])
def test_recorded_steps_are_those_of_the_simulated_schedule(way: str, tmp_path: Path) -> None:
    settings = Settings(max_new_tokens=NEW, sampling=SAMPLED, seed=3, **WAYS[way])
    run(tmp_path / "t.parquet", settings)
    trace = read_trace(tmp_path / "t.parquet", cache=False)
    tokens = tokens_of(trace)
    recorded = build_schedule(trace, tokens, schedule="recorded")
    simulated = build_schedule(
        trace, tokens, concurrency=settings.concurrency, ubatch=settings.prefill_chunk
    )
    assert recorded.offsets.tolist() == simulated.offsets.tolist()
    assert recorded.phase.tolist() == simulated.phase.tolist()
    for start, stop in zip(recorded.offsets, recorded.offsets[1:], strict=False):
        assert sorted(recorded.token[start:stop]) == sorted(simulated.token[start:stop])


@pytest.mark.parametrize("phase", [DECODE, PREFILL])
@pytest.mark.parametrize("batch", [1, 3])
def test_teacher_forced(phase: int, batch: int, tmp_path: Path) -> None:
    """The picks over a text are those of its tokens as they were generated."""
    new, rows = single("full", Sampling(), ())
    texts = [text + new[i][:-1] for i, text in enumerate(TEXTS)]
    settings = Settings(
        teacher_forced=True, forced_phase=phase, batch=batch, prefill_chunk=7, max_new_tokens=999
    )
    done = run(tmp_path / "t.parquet", settings, texts=texts)
    trace = read_trace(tmp_path / "t.parquet", cache=False)
    assert trace.step is None
    assert set(trace.phase.tolist()) == {phase}
    assert trace.experts.tolist() == [
        pick for place in sorted(rows) for picks in rows[place][1] for pick in picks
    ]
    assert any("teacher-forced" in note for note in trace.meta.notes)
    assert (done.decode_tokens or done.prompt_tokens) == len(rows)


def test_a_prompt_too_long_for_the_model(tmp_path: Path) -> None:
    text = prompts([250])
    with pytest.raises(UsageError, match=r"p0: 250 tokens and 11 more .* --max-prompt-tokens 245"):
        run(tmp_path / "t.parquet", Settings(max_new_tokens=NEW), texts=text)
    done = run(tmp_path / "t.parquet", Settings(max_new_tokens=2), texts=text, max_prompt_tokens=20)
    assert done.prompt_tokens == 20
    assert done.decode_tokens <= 1


def test_experts_that_see_other_tokens_are_refused() -> None:
    model = build("full")
    model.model.layers[1].mlp.forward = lambda hidden: hidden  # a kernel that goes round the hook
    with pytest.raises(SimlabError, match=r"layer 1 .* was not called"):
        engine_run(model, TEXTS[:1], Settings())


def test_picks_without_an_expert_are_no_rows(tmp_path: Path) -> None:
    from simlab.capture.engine import StepRows
    from simlab.capture.spool import Spool
    from simlab.trace.schema import TraceMeta
    from simlab.trace.write import TraceWriter

    rows = StepRows(
        step=4,
        request=np.array([0, 0], np.int32),
        token=np.array([5, 6], np.int32),
        phase=np.array([0, 1], np.uint8),
        experts=np.array([[[3, -1, 1], [-1, -1, -1]], [[-1, 2, 0], [7, 6, 5]]], np.int16),
        weights=np.array([[[0.5, 0, 0.25], [0] * 3], [[0, 1, 0], [1, 2, 3]]], np.float16),
    )
    meta = TraceMeta(8, 3, (2, 9))
    with (
        TraceWriter(tmp_path / "t.parquet", meta, weights=True, step=True) as writer,
        Spool(writer, (2, 9), step=True) as spool,
    ):
        spool.put(rows)
    trace = read_trace(tmp_path / "t.parquet", cache=False)
    assert trace.token.tolist() == [5, 6, 6]
    assert trace.layer.tolist() == [2, 2, 9]
    assert trace.phase.tolist() == [0, 1, 1]
    assert trace.offsets.tolist() == [0, 2, 4, 7]
    assert trace.experts.tolist() == [3, 1, 2, 0, 7, 6, 5]
    assert trace.weights is not None
    assert trace.weights.tolist() == [0.5, 0.25, 1, 0, 1, 2, 3]
