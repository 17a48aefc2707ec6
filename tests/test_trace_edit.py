"""Slicing and merging traces."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import pytest
from trace_cases import assert_same, random_trace, regular, rows_of

from simlab.cli import main
from simlab.errors import UsageError
from simlab.trace.edit import merge_traces, slice_trace
from simlab.trace.read import read_trace
from simlab.trace.validate import check_trace
from simlab.trace.write import write_trace


@pytest.mark.parametrize("seed", range(30))
def test_slices_hold_the_rows_that_meet_all_conditions(seed: int) -> None:
    rnd = Random(seed)
    trace = random_trace(rnd)
    requests = set(rnd.sample(sorted(set(trace.request.tolist())), 1)) | {12345}
    low = rnd.choice(sorted(set(trace.token.tolist())))
    layers = set(rnd.sample(trace.meta.moe_layers, rnd.randint(1, len(trace.meta.moe_layers))))
    wanted = [
        row for row in rows_of(trace)
        if row[0] in requests and row[1] >= low and row[3] in layers and row[2] == 1
    ]  # fmt: skip
    conditions = {"requests": requests, "tokens": range(low, 2**31), "layers": layers, "phase": 1}
    if not any(row[4] for row in wanted):
        with pytest.raises(UsageError, match=r"no pick of the trace meets: requests .*decode only"):
            slice_trace(trace, **conditions)
        return
    part = slice_trace(trace, **conditions)
    check_trace(part)
    assert rows_of(part) == wanted
    assert part.meta.moe_layers == tuple(sorted(layers))
    assert len(part.meta.expert_bytes) in (0, len(layers))
    assert (part.weights is None, part.step is None) == (trace.weights is None, trace.step is None)
    assert_same(slice_trace(trace), trace)


def test_a_slice_keeps_what_is_known() -> None:
    trace = regular(3, tags={"0": "prose", "2": "code"}, expert_bytes=((1,), (2,), (3,), (4,)))
    part = slice_trace(trace, requests=[range(1, 9), 0], layers=[3, range(0, 2)])
    assert part.meta.expert_bytes == ((1,), (2,), (4,))
    assert part.meta.notes == ("slice of a trace: requests 0-8, layers 0-1,3",)
    assert slice_trace(trace, requests=[1, 2]).meta.tags == {"2": "code"}
    assert slice_trace(trace, requests=range(0, 3, 2)).meta.tags == {"0": "prose", "2": "code"}
    for layers, words in (([0, 7], "layer 7 is not a MoE layer"), (range(8, 9), "layer 8"),
                          (range(8, 19), "none of the layers is")):  # fmt: skip
        with pytest.raises(UsageError, match=words):
            slice_trace(trace, layers=layers)


def test_merged_requests_are_numbered_anew() -> None:
    first = replace(regular(2, 5, seed=1, tags={"1": "a"}), step=np.arange(40, dtype=np.int32))
    second = regular(3, 4, seed=2, tags={"7": "b", "x": "no request"})
    second = replace(second, request=second.request * 7, step=np.arange(48, dtype=np.int32) * 2)
    whole = merge_traces([first, second])
    check_trace(whole)
    moved = [(row[0] // 7 + 2, *row[1:]) for row in rows_of(second)]
    assert rows_of(whole) == rows_of(first) + moved
    assert whole.meta.tags == {"1": "a", "3": "b"}
    assert whole.step is not None
    assert whole.step.tolist() == [*range(40), *range(40, 40 + 96, 2)]
    assert_same(merge_traces([first]), first)
    assert merge_traces([first, replace(second, step=None)]).step is None
    assert_same(slice_trace(whole, requests=range(2)), first)


def test_merged_origin_is_the_least_trusted() -> None:
    kinds = {kind: regular(kind=kind) for kind in ("captured", "imported", "synthetic")}
    for parts, wanted in (
        (["captured", "captured"], "captured"),
        (["captured", "imported"], "imported"),
        (["captured", "synthetic"], "synthetic"),
        (["imported", "synthetic", "captured"], "synthetic"),
    ):
        assert merge_traces([kinds[kind] for kind in parts]).meta.kind == wanted
    assert merge_traces([regular(), regular(partial=True)]).meta.partial


def test_different_models_are_not_merged() -> None:
    for other, words in (
        (regular(layers=3), "differ in moe_layers"),
        (regular(n_expert=17), r"differ in n_expert \(16 and 17\)"),
        (regular(k=3), "differ in k"),
        (regular(model="m"), "differ in model"),
        (regular(expert_bytes=((5,),) * 4), "differ in expert_bytes"),
    ):
        with pytest.raises(UsageError, match=f"trace 1 and trace 3 {words}"):
            merge_traces([regular(), regular(), other])
    with pytest.raises(UsageError, match="nothing to merge"):
        merge_traces([])


def test_the_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source, part, whole = (str(tmp_path / name) for name in ("s.parquet", "p.parquet", "w.parquet"))
    trace = regular(5, 20, 4)
    write_trace(trace, source)
    cut = ["trace", "slice", source, "--out", part]
    assert main([*cut, "--requests", "0-1,4", "--tokens", "0-4294", "--phase", "decode"]) == 0
    found = read_trace(part)
    assert_same(found, slice_trace(trace, requests=[0, 1, 4], phase=1))
    assert "requests 0-1,4, tokens 0-4294, decode only" in found.meta.notes[0]
    assert found.meta.command.startswith("simlab ")
    assert main(["trace", "merge", part, source, part, "--out", whole]) == 0
    assert read_trace(whole).n_rows == 2 * found.n_rows + trace.n_rows
    capsys.readouterr()
    for args, words in (
        ([*cut, "--requests", "9"], "no pick"),
        ([*cut, "--requests", "3-1"], "not an ascending range"),
        ([*cut, "--requests", "99999999999"], "not an ascending range"),
        ([*cut, "--layers", "a"], "such as 0-9,12"),
        ([*cut, "--layers", "1-"], "such as 0-9,12"),
        ([*cut, "--tokens", ""], "such as 0-9,12"),
        ([*cut, "--layers", "4"], "layer 4 is not a MoE layer"),
    ):
        assert main(args) == 2
        caught = capsys.readouterr().err
        assert words in caught
        assert caught.count("\n") == 1
