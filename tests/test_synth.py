"""Synthetic traces: the seed's toy to the printed digit, and the autoregressive process."""

from __future__ import annotations

import csv
import importlib.util
from collections import OrderedDict
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simlab.cli import main
from simlab.cli.synth import AR_OPTIONS
from simlab.errors import UsageError
from simlab.model.layout import layout_of
from simlab.resources import default_trace
from simlab.trace import synth_ar
from simlab.trace.hash import content_hash
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.stats import trace_stats
from simlab.trace.synth import DEFAULT_PRESET, PRESETS, ar_trace, write_ar
from simlab.trace.synth_ar import ArParams, generate, plan
from simlab.trace.synth_toy import EXPERTS, ORDER, K, toy_trace
from simlab.trace.validate import check_trace

SMALL = ArParams(layers=3, experts=20, k=4, requests=5, prompt_tokens=6, decode_tokens=20)

#: Statistics of the real turn (see docs/synthetic.md), in the order of the script's FITTED.
TARGETS = (0.3795, 0.2668, 0.2364, 0.7299, 0.1098)
#: How far the mean over synthetic turns may lie from them.
TOLERANCE = 0.015


@pytest.fixture(scope="module")
def fit_script() -> ModuleType:
    path = Path(__file__).parents[1] / "scripts" / "fit_synthetic.py"
    spec = importlib.util.spec_from_file_location("fit_synthetic", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def sample() -> Trace:
    return read_trace(default_trace(), cache=False)


# --- toy ----------------------------------------------------------------------------------------


def lru_misses(rows: list[list[int]], slots: int) -> int:
    cache: OrderedDict[int, None] = OrderedDict()
    misses = 0
    for row in rows:
        for expert in row:
            if expert in cache:
                cache.move_to_end(expert)
                continue
            misses += 1
            if len(cache) >= slots:
                cache.popitem(last=False)
            cache[expert] = None
    return misses


def lfu_decay_misses(rows: list[list[int]], slots: int) -> int:
    score = np.zeros(EXPERTS)
    worth = np.full(EXPERTS, np.inf)  # the score of residents
    misses = 0
    for row in rows:
        for expert in row:
            score[expert] += 1
            if worth[expert] < np.inf:
                worth[expert] += 1
                continue
            misses += 1
            if misses <= slots:
                worth[expert] = score[expert]
                continue
            lowest = int(worth.argmin())  # ties: the lowest id
            if score[expert] >= worth[lowest]:
                worth[lowest], worth[expert] = np.inf, score[expert]
        score *= 2 ** (-1 / 256)
        worth *= 2 ** (-1 / 256)
    return misses


def test_toy_gives_all_cells_of_the_article(shared):
    with open(shared / "golden" / "toy.csv", newline="") as file:
        wanted = list(csv.DictReader(file))
    assert len(wanted) == 12
    traces = {stickiness: toy_trace(stickiness) for stickiness in ORDER}
    for cell in wanted:
        trace = traces[float(cell["stickiness"])]
        rows = trace.experts.reshape(-1, K).tolist()
        for name, count in (("lru", lru_misses), ("lfu", lfu_decay_misses)):
            misses = count(rows, int(cell["slots"]))
            assert f"{100 * (1 - misses / trace.n_picks):.1f}" == cell[f"{name}_hit_pct"]
            assert f"{misses / len(rows):.2f}" == cell[f"{name}_misses_per_token"]


def test_toy_traces_are_valid_labelled_and_depend_on_those_before(tmp_path, capsys):
    trace = toy_trace(0.4, tokens=50)
    check_trace(trace)
    assert trace.meta.kind == "synthetic" and trace.n_rows == 50
    alone = toy_trace(0.4, tokens=50, after=())
    assert not np.array_equal(trace.experts, alone.experts)
    assert np.array_equal(trace.experts, toy_trace(0.4, tokens=50, after=(0.0,)).experts)
    for options, same in ([], trace), (["--after", "none"], alone), (["--after", "0"], trace):
        out = tmp_path / "toy.parquet"
        command = ["synth", "toy", "--stickiness", "0.4", "--tokens", "50", "--out", str(out)]
        assert main([*command, *options]) == 0
        assert "synthetic" in capsys.readouterr().out
        assert np.array_equal(read_trace(out, cache=False).experts, same.experts)


def test_a_fully_sticky_toy_repeats_its_first_token():
    picks = toy_trace(1.0, tokens=20).experts.reshape(20, K)
    assert (picks == picks[0]).all()


# --- the autoregressive process -----------------------------------------------------------------


def test_same_seed_same_picks_whatever_the_chunks():
    whole = ar_trace(SMALL)
    check_trace(whole)
    for chunk_tokens in (1, 7, 1000):
        assert content_hash(ar_trace(SMALL, chunk_tokens=chunk_tokens)) == content_hash(whole)
    assert content_hash(ar_trace(replace(SMALL, seed=2))) != content_hash(whole)
    # the picks do not depend on machine, numpy or Python: a change here breaks shipped traces
    assert content_hash(whole) == (
        "a7421ee851d885a6b7b6512fd4cf700b6479e5a2d44faf1318d6ed733a103f1d"
    )


def test_a_shorter_trace_is_the_beginning_of_a_longer_one():
    short, whole = ar_trace(replace(SMALL, requests=2)), ar_trace(SMALL)
    assert np.array_equal(short.experts, whole.experts[: short.n_picks])
    assert np.array_equal(short.token, whole.token[: short.n_rows])


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_any_shape_is_a_valid_trace(data):
    experts = data.draw(st.integers(1, 70))
    params = ArParams(
        layers=data.draw(st.integers(1, 5)),
        experts=experts,
        k=data.draw(st.integers(1, experts)),
        requests=data.draw(st.integers(1, 4)),
        prompt_tokens=data.draw(st.integers(0, 9)),
        decode_tokens=data.draw(st.integers(1, 9)),
        length_spread=data.draw(st.floats(0, 1)),
        topics=data.draw(st.integers(1, 26)),
        topic_switch=data.draw(st.floats(0, 1)),
        layer_spread=data.draw(st.floats(0, 1)),
        seed=data.draw(st.integers(0, 2**63 - 1)),
    )
    drawn = plan(params)
    tokens = int(drawn.prompt.sum() + drawn.decode.sum())
    trace = ar_trace(params)
    check_trace(trace)
    assert trace.meta.kind == "synthetic" and trace.meta.tags.keys() == {
        str(r) for r in range(params.requests)
    }
    assert trace.n_rows == tokens * params.layers
    assert (np.diff(trace.offsets) == params.k).all()
    assert int((trace.phase == 1).sum()) == int(drawn.decode.sum()) * params.layers


def test_lengths_spread_evenly_around_their_means():
    params = replace(SMALL, requests=4000, prompt_tokens=64, decode_tokens=256)
    drawn = plan(params)
    assert (drawn.prompt.min(), drawn.prompt.max()) == (32, 96)
    assert (drawn.decode.min(), drawn.decode.max()) == (128, 384)
    assert abs(drawn.decode.mean() - 256) < 4 and abs(drawn.prompt.mean() - 64) < 1
    assert set(drawn.topic.tolist()) == set(range(params.topics))
    equal = plan(replace(params, length_spread=0.0))
    assert (equal.prompt == 64).all() and (equal.decode == 256).all()


def test_the_highest_logits_are_picked_lowest_id_among_equals():
    random = np.random.default_rng(3)
    logits = random.integers(-5, 5, (40, 3, 9)).astype(np.float64)
    for k in (1, 4, 9):
        picked = synth_ar._top(logits, k)
        for row, got in zip(logits.reshape(-1, 9), picked.reshape(-1, k), strict=True):
            assert got.tolist() == sorted(range(9), key=lambda e: (-row[e], e))[:k]


def test_normals_are_standard_and_bounded():
    numbers = synth_ar._normals(synth_ar._stream(5, 0), (200_000,))
    assert abs(numbers.mean()) < 0.01 and abs(numbers.std() - 1) < 0.01
    assert abs((numbers**4).mean() - 2.7) < 0.05  # a sum of four uniforms: 3 - 6 / (5 * 4)
    assert np.abs(numbers).max() < 3.47


def overlap(params: ArParams, lag: int) -> float:
    picks = np.concatenate([chunk.experts for chunk in generate(params)])
    shared = [
        len(np.intersect1d(a, b)) for a, b in zip(picks[lag:, 0], picks[:-lag, 0], strict=True)
    ]
    return float(np.mean(shared)) / params.k


def test_each_component_does_what_its_name_says():
    none = ArParams(
        layers=1, experts=64, k=8, requests=1, prompt_tokens=0, decode_tokens=800, length_spread=0,
        topics=2, topic_switch=0, popularity=0, topic=0, slow=0, fast=0, layer_spread=0,
    )  # fmt: skip
    uniform = 8 / 64
    for lag in (1, 8, 32):
        assert abs(overlap(none, lag) - uniform) < 0.03
    # popularity: at any distance alike
    popular = replace(none, popularity=2.0)
    assert overlap(popular, 1) > uniform + 0.2
    assert abs(overlap(popular, 1) - overlap(popular, 32)) < 0.03
    # slow and fast: gone at a distance that their persistence sets
    fast = replace(none, fast=2.0, fast_rho=0.6)
    assert overlap(fast, 1) > uniform + 0.1 and abs(overlap(fast, 32) - uniform) < 0.03
    slow = replace(none, slow=2.0, slow_rho=0.98)
    assert overlap(slow, 8) > overlap(fast, 8) + 0.1
    # a topic lasts as long as the request does not turn to another
    topic = replace(none, topic=2.0)
    assert overlap(topic, 1) > uniform + 0.2
    assert overlap(replace(topic, topic_switch=1.0), 1) < uniform + 0.05  # the other topic
    assert overlap(replace(topic, topic_switch=1.0), 2) > uniform + 0.2  # and back


# --- the preset and its sample ------------------------------------------------------------------


def test_preset_lies_on_the_statistics_it_was_fitted_to(fit_script):
    turn = np.zeros((128, 48, 128), bool)
    turn[..., :6] = True  # only its shape counts
    means = fit_script.simulate(PRESETS[DEFAULT_PRESET].params, turn, 28, range(8)).mean(0)
    assert np.abs(means[: len(TARGETS)] - TARGETS).max() < TOLERANCE


def test_targets_are_those_of_the_real_turn(fit_script, shared, tmp_path):
    out = tmp_path / "qwen.parquet"
    source = shared / "traces" / "bmoe" / "qwen.route.csv"
    assert main(["import", "--from", "bmoe", str(source), "--out", str(out)]) == 0
    picks, prompt = fit_script.read_turn(str(out))
    assert picks.shape == (128, 48, 128) and prompt == 28
    assert picks.sum(-1).min() == picks.sum(-1).max() == 6
    assert np.abs(fit_script.statistics(picks)[: len(TARGETS)] - TARGETS).max() < 1e-4


def test_the_sample_is_what_its_command_makes(sample, tmp_path):
    words = sample.meta.command.split()
    assert words == ["simlab", "synth", "ar", "--preset", DEFAULT_PRESET]
    again = write_ar(tmp_path / "again.parquet", PRESETS[DEFAULT_PRESET].params)
    assert again == sample.meta.with_(versions=again.versions)


def test_the_sample_has_the_shape_of_the_model(sample):
    assert default_trace().stat().st_size <= 2_000_000
    meta = sample.meta
    assert (meta.kind, meta.n_expert, meta.k) == ("synthetic", 128, 8)
    assert "synthetic" in meta.model and any("not fitted" in note for note in meta.notes)
    assert len(meta.tags) >= 16 and all(tag.startswith("topic-") for tag in meta.tags.values())
    assert [(len(g.layers), g.tensor_bytes) for g in layout_of(meta).groups] == [
        (24, (884_736, 884_736, 1_290_240)),
        (24, (884_736, 884_736, 884_736)),
    ]
    stats = trace_stats(sample)
    assert stats.requests >= 16 and stats.missing_rows == 0
    assert stats.copied_requests == 0 and stats.distinct_heads == stats.requests
    assert stats.zero_rows == stats.full_rows == stats.repeated_tokens == 0


def test_layer_bytes_are_those_of_the_real_file(shared):
    header = (shared / "traces" / "bmoe" / "qwen.route.csv").read_text().split("turn,phase")[0]
    real = [int(part.split()[0]) for part in header.split("expert_bytes=")[1:]]
    assert [sum(sizes) for sizes in PRESETS[DEFAULT_PRESET].expert_bytes] == real


# --- the command line ---------------------------------------------------------------------------


def test_every_parameter_has_an_option_and_is_recorded(tmp_path, capsys):
    assert set(AR_OPTIONS) == {f.name for f in fields(ArParams)}
    out = tmp_path / "x.parquet"
    given = {"layers": 2, "experts": 9, "k": 2, "requests": 3, "decode_tokens": 5, "slow": 1.5}
    options = [w for n, v in given.items() for w in ("--" + n.replace("_", "-"), str(v))]
    bytes_option = ["--expert-bytes", "0:100+50,1:60"]
    assert main(["synth", "ar", *options, *bytes_option, "--out", str(out)]) == 0
    assert "synthetic" in capsys.readouterr().out
    trace = read_trace(out, cache=False)
    assert content_hash(trace) == content_hash(ar_trace(replace(ArParams(), **given)))
    assert trace.meta.expert_bytes == ((100, 50), (60,))
    assert any("slow differ from the preset" in note for note in trace.meta.notes)
    # the recorded command makes the same trace
    recorded = trace.meta.command.split()
    assert recorded[0] == "simlab"
    again = tmp_path / "again.parquet"
    assert main([*recorded[1:], "--out", str(again)]) == 0
    assert read_trace(again, cache=False).meta == trace.meta
    assert {path.name for path in tmp_path.iterdir()} == {"x.parquet", "again.parquet"}


@pytest.mark.parametrize(
    "wrong",
    [
        {"layers": 0}, {"experts": 0}, {"experts": 65537}, {"k": 0}, {"k": 129}, {"requests": 0},
        {"prompt_tokens": -1}, {"decode_tokens": 0, "prompt_tokens": 0}, {"length_spread": 1.1},
        {"topics": 0}, {"topics": 27}, {"topic_switch": -0.1}, {"slow": float("nan")},
        {"fast": float("inf")}, {"slow_rho": 1.0}, {"layer_spread": -1.0}, {"seed": -1},
    ],
    ids=str,
)  # fmt: skip
def test_impossible_parameters_are_one_line_and_leave_no_file(wrong, tmp_path, capsys):
    with pytest.raises(UsageError):
        ar_trace(replace(SMALL, **({"experts": 128} if "k" in wrong else {}), **wrong))
    options = [w for n, v in wrong.items() for w in ("--" + n.replace("_", "-"), str(v))]
    assert main(["synth", "ar", *options, "--out", str(tmp_path / "x.parquet")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1 and "--" in said.err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "options",
    [
        ["toy", "--stickiness", "1.5"],
        ["toy", "--stickiness", "nan"],
        ["toy", "--stickiness", "0.4", "--after", "0;1"],
        ["toy", "--stickiness", "0.4", "--after", "7"],
        ["toy", "--stickiness", "0.4", "--tokens", "0"],
        ["ar", "--preset", "qwen"],
        ["ar", "--layers", "3", "--expert-bytes", "0-1:5"],
        ["ar", "--layers", "3", "--expert-bytes", "many"],
    ],
    ids=" ".join,
)
def test_other_bad_requests_are_one_line(options, tmp_path, capsys):
    assert main(["synth", *options, "--out", str(tmp_path / "x.parquet")]) == 2
    said = capsys.readouterr()
    assert said.out == "" and said.err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_a_failure_on_the_way_leaves_nothing(tmp_path, monkeypatch):
    def fails(*_: object) -> None:
        raise RuntimeError("stop")

    with pytest.raises(RuntimeError):
        write_ar(tmp_path / "x.parquet", SMALL, progress=fails)
    assert list(tmp_path.iterdir()) == []
    assert main(["synth", "ar", "--out", str(tmp_path / "absent" / "x.parquet")]) == 2
