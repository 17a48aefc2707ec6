"""Statistics of traces: by hand on tiny ones, against a plain twin on random ones."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest
from trace_cases import Row, make, random_trace, regular, rows_of

from simlab.cli import main
from simlab.trace.edit import merge_traces
from simlab.trace.schema import Trace
from simlab.trace.stats import HEAD_TOKENS, LAGS, SHARES, TraceStats, trace_stats
from simlab.trace.write import write_trace


def naive_stats(trace: Trace) -> dict:
    """The same figures in the words of their definitions."""
    rows = rows_of(trace)
    n_expert, layers = trace.meta.n_expert, trace.meta.moe_layers
    at = {(*row[:2], row[3]): row[4] for row in rows}
    phase = {row[:2]: row[2] for row in rows}
    tokens = sorted(phase)
    content = {
        token: [(la, at[*token, la]) for la in layers if (*token, la) in at] for token in tokens
    }
    overlaps = {}
    for lag in LAGS:
        picks = shared = 0
        chance, count = 0.0, 0
        for (request, token, layer), experts in at.items():
            earlier = at.get((request, token - lag, layer))
            if earlier is not None:
                count += 1
                picks += len(experts)
                shared += len(set(experts) & set(earlier))
                chance += len(experts) * len(earlier) / n_expert
        overlaps[lag] = (count, shared / picks, chance / picks) if picks else (count, None, None)
    by_layer = {
        layer: sorted(
            (sum(e in row[4] for row in rows if row[3] == layer) for e in range(n_expert)),
            reverse=True,
        )
        for layer in layers
    }
    by_request = [
        [sum(e in row[4] for row in rows if (row[0], row[3]) == place) for e in range(n_expert)]
        for place in {(row[0], row[3]) for row in rows}
    ]
    tops = sorted({max(1, round(share * n_expert)) for share in SHARES})
    streams: dict[int, list] = {}
    for token in tokens:
        streams.setdefault(token[0], []).append(content[token])
    whole = [str(stream) for stream in streams.values()]
    return {
        "requests": len(streams),
        "tokens": len(tokens),
        "prefill_tokens": sum(p == 0 for p in phase.values()),
        "decode_tokens": sum(p == 1 for p in phase.values()),
        "rows": len(rows),
        "missing_rows": sum((*t, la) not in at for t in tokens for la in layers),
        "picks": sum(len(row[4]) for row in rows),
        "k_min": min(len(row[4]) for row in rows),
        "k_max": max(len(row[4]) for row in rows),
        "keys": len(layers) * n_expert,
        "distinct_keys": len({(row[3], e) for row in rows for e in row[4]}),
        "overlaps": overlaps,
        "coverage": [
            (
                n,
                sum(sum(c[:n]) for c in by_layer.values()) / trace.n_picks,
                sum(sum(sorted(c, reverse=True)[:n]) for c in by_request) / trace.n_picks,
            )
            for n in tops
        ],
        "repeated_tokens": sum(
            a[0] == b[0] and content[a] == content[b] for a, b in pairwise(tokens)
        ),
        "zero_rows": sum(row[4] == [0] for row in rows),
        "full_rows": sum(len(row[4]) == n_expert for row in rows),
        "copied_requests": len(whole) - len(set(whole)),
        "distinct_heads": len({str(stream[:HEAD_TOKENS]) for stream in streams.values()}),
    }


def plain(stats: TraceStats) -> dict:
    found = {**vars(stats)}
    assert found.pop("stickiness") == stats.overlaps[0]
    found["overlaps"] = {o.lag: (o.rows, o.share, o.uniform) for o in stats.overlaps}
    found["coverage"] = [(c.experts, c.share, c.within_request) for c in stats.coverage]
    return found


def assert_stats(trace: Trace) -> None:
    found, wanted = plain(trace_stats(trace)), naive_stats(trace)
    for lag in LAGS:
        assert found["overlaps"].pop(lag) == pytest.approx(wanted["overlaps"].pop(lag))
    for mine, theirs in zip(found.pop("coverage"), wanted.pop("coverage"), strict=True):
        assert mine == pytest.approx(theirs)
    assert found == wanted


@pytest.mark.parametrize("seed", range(60))
def test_random_traces_against_the_twin(seed: int) -> None:
    rnd = Random(seed)
    trace = random_trace(rnd)
    while trace.meta.n_expert > 1000:  # the twin counts every expert
        trace = random_trace(rnd)
    assert_stats(trace)


@pytest.mark.parametrize("gaps", [False, True])
def test_long_requests_against_the_twin(gaps: bool) -> None:
    trace = regular(3, 50, 2, n_expert=6, k=3)
    if gaps:
        rows = [row for row in rows_of(trace) if row[1] % 11 != 3 and (row[1] + row[3]) % 17]
        trace = make(rows, 6)
    assert_stats(trace)
    rows = rows_of(trace)
    copies = merge_traces([trace, make([(9, *row[1:]) for row in rows if row[0] == 1], 6), trace])
    assert_stats(copies)
    assert trace_stats(copies).copied_requests == 4


def test_by_hand() -> None:
    rows: list[Row] = [
        (0, 0, 0, 1, [0, 1]), (0, 0, 0, 4, [2, 3]),
        (0, 1, 1, 1, [1, 0]), (0, 1, 1, 4, [3, 1]),  # shares 2 of 2 and 1 of 2
        (0, 2, 1, 1, [1, 0]), (0, 2, 1, 4, [3, 1]),  # the same again
        (5, 2, 1, 1, [3, 2]),  # another request: no predecessor; layer 4 is missing
        (5, 3, 1, 1, [0, 1]), (5, 3, 1, 4, [0]),
    ]  # fmt: skip
    stats = trace_stats(make(rows, n_expert=4))
    assert (stats.requests, stats.tokens, stats.prefill_tokens, stats.decode_tokens) == (2, 5, 1, 4)
    assert (stats.rows, stats.missing_rows, stats.picks) == (9, 1, 17)
    assert (stats.k_min, stats.k_max) == (1, 2)
    assert (stats.keys, stats.distinct_keys) == (8, 8)
    # pairs: 2+1+2+2 shared of 8 picks in request 0, 0 of 2 in request 5
    assert stats.stickiness.share == pytest.approx(7 / 10)
    assert stats.stickiness.uniform == pytest.approx(2 / 4)
    assert stats.stickiness.rows == 5
    assert [o.share for o in stats.overlaps[1:]] == [None, None]
    # layer 1: 4 4 1 1 of its 10 picks, layer 4: 3 2 1 1 of its 7
    # request 0: 3 3 and 3 2 1 of 6 each; request 5: 1 1 1 1 of 4 and 1 of 1
    assert [(c.experts, c.share, c.within_request) for c in stats.coverage] == [
        (1, pytest.approx(7 / 17), pytest.approx(8 / 17)),
        (2, pytest.approx(13 / 17), pytest.approx(14 / 17)),
    ]  # fmt: skip
    assert stats.repeated_tokens == 1
    assert (stats.zero_rows, stats.full_rows) == (1, 0)
    assert (stats.copied_requests, stats.distinct_heads) == (0, 2)


def test_hottest_21_of_128() -> None:
    stats = trace_stats(regular(n_expert=128, k=8))
    assert [c.experts for c in stats.coverage] == [13, 21, 32, 64]


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "t.parquet"
    trace = regular(3, 20, 4, model="m", expert_bytes=((5, 6),) * 4)
    trace = replace(trace, experts=trace.experts.copy())
    write_trace(trace, path)
    assert main(["inspect", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    stats = trace_stats(trace).to_dict()
    assert {name: found[name] for name in stats} == json.loads(json.dumps(stats))
    assert (found["model"], found["n_expert"], found["k"]) == ("m", 16, 4)
    assert found["synthetic"] is False
    assert [cycle["concurrency"] for cycle in found["cycle"]] == [1, 4, 16]
    assert found["cycle"][0] == {"concurrency": 1, "min": 16, "median": 16, "max": 16}
    # three streams of 15 decode tokens each: at 4 lanes all decode together, from first to last
    decode = trace.phase == 1
    steps = {
        token: {
            (int(la), int(e))
            for la, row in zip(
                trace.layer[decode & (trace.token == token)],
                trace.experts.reshape(-1, 4)[decode & (trace.token == token)],
                strict=True,
            )
            for e in row
        }
        for token in range(5, 20)
    }
    sizes = sorted(map(len, steps.values()))
    assert (found["cycle"][1]["min"], found["cycle"][1]["max"]) == (sizes[0], sizes[-1])
    assert main(["inspect", str(path)]) == 0
    text = capsys.readouterr().out
    assert "4 MoE layers x 16 experts, k = 4" in text
    assert "15 prefill, 45 decode" in text
    assert "SYNTHETIC" not in text
    assert max(map(len, text.splitlines()[1:])) <= 100


def test_the_sample_is_said_to_be_synthetic(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect"]) == 0
    first = capsys.readouterr().out.splitlines()[0]
    assert "the sample that ships with simlab" in first
    assert "SYNTHETIC" in first
    assert main(["inspect", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["synthetic"] is True


def test_a_written_trace_keeps_its_figures(tmp_path: Path) -> None:
    from simlab.trace.read import read_trace

    trace = random_trace(Random(5))
    write_trace(trace, tmp_path / "t.parquet")
    assert trace_stats(read_trace(tmp_path / "t.parquet")) == trace_stats(trace)
    assert np.array_equal(read_trace(tmp_path / "t.parquet").experts, trace.experts)
