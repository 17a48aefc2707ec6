"""Importers: the real traces, what must be said, and what other tools put into their dumps."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from random import Random

import numpy as np
import polars as pl
import pyarrow.parquet as pq
import pytest
from trace_cases import assert_same, make, regular, rows_of

from simlab.cli import main
from simlab.errors import TraceError, UsageError
from simlab.trace.arrow import to_arrow
from simlab.trace.importers import IMPORTERS, import_trace
from simlab.trace.importers.bmoe import read_recorded_flags
from simlab.trace.importers.options import ImportOptions, parse_expert_bytes
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.write import write_trace

# file, options, then what its README says: requests, tokens, MoE layers, n_expert, k
REAL = [
    ("gptoss20b_decode_a", ["--n-expert", "32", "--expert-bytes", "13219200"],
     350, 112_791, range(24), 32, 4),
    ("dsv2lite_a", ["--n-expert", "64", "--expert-bytes", "1-26:4866048", "--phase", "prefill"],
     399, 33_806, range(1, 27), 64, 6),
    ("olmoe", ["--n-expert", "64", "--expert-bytes", "0-7:3538944,8-15:3538944"],
     5, 607, range(16), 64, 8),
]  # fmt: skip


@pytest.mark.parametrize("case", REAL, ids=lambda case: case[0])
def test_real_parquet(
    case: tuple, shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, options, requests, tokens, layers, n_expert, k = case
    source = shared / "traces" / f"{name}.parquet"
    out = tmp_path / "t.parquet"
    args = ["import", str(source), "--from", "parquet", "-o", str(out), "--model", name, "--json"]
    assert main([*args, *options]) == 0
    said = json.loads(capsys.readouterr().out)
    trace = read_trace(out, cache=False)
    meta = trace.meta
    frame = pl.read_parquet(source)
    assert trace.to_polars()["experts"].to_list() == frame["experts"].to_list()
    for column in ("request", "token", "layer"):
        assert getattr(trace, column).tolist() == frame[column].to_list()
    assert len(np.unique(trace.request)) == requests
    assert said["tokens"] == tokens
    assert trace.n_rows == said["rows"] == tokens * len(layers)
    assert trace.n_picks == said["picks"] == tokens * len(layers) * k
    assert (meta.n_expert, meta.k, meta.moe_layers) == (n_expert, k, tuple(layers))
    assert meta.expert_bytes == (({"gptoss20b_decode_a": 13_219_200, "dsv2lite_a": 4_866_048,
                                   "olmoe": 3_538_944}[name],),) * len(layers)  # fmt: skip
    assert (meta.kind, meta.model, meta.source) == ("imported", name, f"{name}.parquet")
    assert meta.command.startswith("simlab ")
    assert set(meta.versions) >= {"simlab", "numpy", "python"}
    assert set(trace.phase.tolist()) == {0 if "prefill" in options else 1}


# file, prompt tokens, decode tokens, layers, k; lookups and hits of its own cache (see the issue)
BMOE = [
    ("qwen", "Qwen3-30B-A3B-Q4_K_M", 28, 128, 48, 6, 39_526, 29_597),
    ("gptoss", "gpt-oss-120b-Q4_K_M", 85, 64, 36, 2, 6_375, 2_066),
]


@pytest.mark.parametrize("case", BMOE, ids=lambda case: case[0])
def test_real_bmoe(case: tuple, shared: Path, tmp_path: Path) -> None:
    name, model, prompt, decode, layers, k, lookups, hits = case
    source = shared / "traces" / "bmoe" / f"{name}.route.csv"
    out = tmp_path / "t.parquet"
    assert main(["import", str(source), "--from", "bmoe", "--out", str(out)]) == 0
    trace = read_trace(out, cache=False)
    meta = trace.meta
    assert (meta.model, meta.n_expert, meta.k) == (model, 128, k)
    assert meta.moe_layers == tuple(range(layers))
    # the last layer is computed for the last prompt token only
    assert trace.n_rows == (prompt + decode) * layers - (prompt - 1)
    assert trace.n_picks == trace.n_rows * k
    assert len(np.unique(trace.token[trace.phase == 0])) == prompt
    assert len(np.unique(trace.token[trace.phase == 1])) == decode
    sizes = {13_219_200} if name == "gptoss" else {2_654_208, 3_059_712}
    assert {row[0] for row in meta.expert_bytes} == sizes

    frame = pl.read_csv(source, comment_prefix="#")
    picks = frame.sort("turn", "step", "layer", "slot")
    assert trace.experts.tolist() == picks["expert"].to_list()
    assert trace.weights is not None
    assert np.array_equal(trace.weights, picks["weight"].to_numpy().astype(np.float16))

    flags = read_recorded_flags(source)
    assert flags.expert.tolist() == frame["expert"].to_list()
    assert flags.residency.tolist() == frame["residency"].to_list()
    # one batch: a layer of a decode token, or of the whole prompt
    batch = np.where(flags.token < prompt, 0, flags.token)
    places, first = np.unique(
        np.stack([batch, flags.layer, flags.expert]), axis=1, return_index=True
    )
    assert places.shape[1] == lookups
    assert flags.residency[first].sum() == hits


def test_shuffled_rows_are_sorted(tmp_path: Path) -> None:
    trace = regular()
    order = Random(1).sample(range(trace.n_rows), trace.n_rows)
    pq.write_table(to_arrow(trace).take(order), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match="'simlab import' sorts them"):
        read_trace(tmp_path / "t.parquet", n_expert=16)
    found = import_trace("parquet", tmp_path / "t.parquet", ImportOptions(n_expert=16))
    assert_same(found, trace)


def test_options_go_before_the_file_and_the_file_before_defaults(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    told = regular(
        kind="synthetic",
        model="made up",
        source="a generator",
        notes=("made up",),
        tags={"1": "x"},
        expert_bytes=((1, 2), (1, 2), (3, 4), (3, 4)),
    )
    told = replace(told, meta=told.meta.with_(seed=7))
    write_trace(told, path)
    meta = import_trace("parquet", path, ImportOptions()).meta
    assert (meta.kind, meta.model, meta.source, meta.seed) == (
        "synthetic", "made up", "a generator", 7,
    )  # fmt: skip
    assert (meta.tags, meta.notes, meta.expert_bytes) == (
        {"1": "x"}, ("made up",), told.meta.expert_bytes,
    )  # fmt: skip
    options = ImportOptions(n_expert=20, k=5, model="m", expert_bytes="9", source="s", command="c")
    meta = import_trace("parquet", path, options).meta
    assert (meta.n_expert, meta.k, meta.model, meta.source, meta.command) == (20, 5, "m", "s", "c")
    assert meta.expert_bytes == ((9,),) * 4
    assert meta.kind == "synthetic"
    for phase, wanted in (("prefill", [0]), ("decode", [1]), ("column", [0, 1])):
        trace = import_trace("parquet", path, ImportOptions(phase=phase))
        assert sorted(set(trace.phase.tolist())) == wanted


def test_expert_bytes() -> None:
    assert parse_expert_bytes("7", (1, 2, 5)) == ((7,), (7,), (7,))
    assert parse_expert_bytes("0-2:7, 3-9:4+4+5", (1, 2, 5)) == ((7,), (7,), (4, 4, 5))
    assert parse_expert_bytes("1:1,2:2,5:3", (1, 2, 5)) == ((1,), (2,), (3,))
    for spec, words in {
        "": "write N",
        "x": "write N",
        "1-2": "write N",
        "-3": "write N",
        "1.5": "write N",
        "0": "must be positive",
        "3+0": "must be positive",
        "1-2:7": "does not cover layer 5",
        "1-5:7,2:8": "names layer 2 twice",
        "7,8": "names layer 1 twice",
    }.items():
        with pytest.raises(UsageError, match=words):
            parse_expert_bytes(spec, (1, 2, 5))


def test_what_must_be_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "s.parquet"
    out = tmp_path / "t.parquet"
    pq.write_table(to_arrow(regular()), source)
    begin = ["import", str(source), "--from", "parquet", "--out", str(out)]
    for options, code, words in (
        ([], 2, "--n-expert N"),
        (["--n-expert", "12"], 1, "n_expert is 12"),
        (["--n-expert", "3"], 2, "n_expert = 3 with k = 4"),
        (["--n-expert", "16", "--k", "3"], 1, "more than the trace's k = 3"),
        (["--n-expert", "16", "--k", "17"], 2, "k = 17"),
        (["--n-expert", "16", "--k", "0"], 2, "k = 0"),
        (["--n-expert", "0"], 2, "n_expert = 0"),
        (["--n-expert", "99999999"], 2, "is not possible"),
        (["--n-expert", "16", "--expert-bytes", "0-1:5"], 2, "does not cover layer 2"),
    ):
        assert main([*begin, *options]) == code
        caught = capsys.readouterr()
        assert words in caught.err
        assert caught.err.count("\n") == 1
        assert not out.exists()
    assert main(["import", str(tmp_path / "none"), "--from", "bmoe", "-o", str(out)]) == 1
    assert "No such file" in capsys.readouterr().err


def test_damaged_files_are_told(shared: Path, tmp_path: Path) -> None:
    source = (shared / "traces" / "bmoe" / "gptoss.route.csv").read_text()
    lines = source.splitlines(keepends=True)
    path = tmp_path / "t.csv"
    header = next(i for i, line in enumerate(lines) if line.startswith("turn,"))
    for text, words in {
        "": "not a BigMoeOnEdge route trace",
        "turn,phase\n0,0\n": "not a BigMoeOnEdge route trace",
        "# route_trace v2\n" + source: "not a BigMoeOnEdge route trace",
        source.replace("n_expert=", "experts="): "does not say n_expert",
        "".join(lines[: header + 1]): "empty",
        source.replace("residency", "resident"): "residency",
        source[: len(source) // 2]: "damaged|missing|more than",
        "".join(lines[: header + 5] + lines[header + 6 :]): "not slots 0, 1, 2",
        source.replace("\n0,0,0,0,0,83,", "\n0,0,0,0,0,x,"): "damaged",
        source.replace("\n0,0,0,0,0,83,", "\n0,0,0,0,0,128,"): "n_expert is 128",
        source.replace("\n0,0,0,0,0,83,", "\n0,2,0,0,0,83,"): "phase is not 0 or 1",
        source.replace("\n0,0,0,0,0,83,", "\n-1,0,0,0,0,83,"): "turn is negative",
    }.items():
        path.write_text(text)
        with pytest.raises(TraceError, match=words) as caught:
            write_trace(import_trace("bmoe", path, ImportOptions()), tmp_path / "o.parquet")
        assert "\n" not in str(caught.value)
    path.write_bytes((shared / "traces" / "olmoe.parquet").read_bytes())
    with pytest.raises(TraceError, match="not a BigMoeOnEdge route trace"):
        import_trace("bmoe", path, ImportOptions())
    path.write_text(source)
    with pytest.raises(TraceError, match="not a Parquet file"):
        import_trace("parquet", path, ImportOptions(n_expert=4))
    assert not (tmp_path / "o.parquet").exists()


def with_dummies() -> tuple[Trace, Trace]:
    """A dump with padding, a full row and a warm-up batch in front; and what is left of it."""
    real = [(r, t + 200, p, la, e) for r, t, p, la, e in rows_of(regular(requests=2))]
    warm = [(0, t, 0, la, [9, 3, 1, 2]) for t in range(100) for la in range(4)]
    # of a run the first token stays a dummy too: it is the same batch
    padding = [(0, 150, 0, la, [0, 0, 0, 0] if la == 2 else [1, 2, 3, 4]) for la in range(4)]
    full = [(1, 5, 0, la, list(range(16)) if la == 0 else [4, 3, 2, 1]) for la in range(4)]
    few = [(1, t, 0, la, [5, 6, 7, 8]) for t in range(10, 73) for la in range(4)]
    kept = real + few
    return make(kept + warm + padding + full, 16), make(sorted(kept), 16)


def test_dummies_are_dropped_when_asked_and_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump, real = with_dummies()
    source = tmp_path / "s.parquet"
    out = tmp_path / "t.parquet"
    pq.write_table(to_arrow(dump), source)
    args = ["import", str(source), "--from", "parquet", "--n-expert", "16", "--out", str(out)]
    assert main(args) == 1
    assert "picks expert 0 more than once" in capsys.readouterr().err
    assert main([*args, "--drop-dummies"]) == 0
    assert "left out 102 dummy tokens (408 rows)" in capsys.readouterr().out
    trace = read_trace(out, cache=False)
    assert_same(trace, real)
    assert trace.meta.notes == ("import left out 102 dummy tokens (408 rows)",)
    # nothing to drop: nothing is noted; nothing left: an error
    clean = tmp_path / "clean.parquet"
    pq.write_table(to_arrow(regular()), clean)
    options = ImportOptions(n_expert=16, drop_dummies=True)
    found = import_trace("parquet", clean, options)
    assert_same(found, regular())
    assert found.meta.notes == ()
    pq.write_table(to_arrow(make([(0, t, 0, 0, [1, 2]) for t in range(64)])), clean)
    with pytest.raises(TraceError, match="nothing is left"):
        import_trace("parquet", clean, options)


def test_a_model_whose_k_is_all_experts_has_no_dummies(tmp_path: Path) -> None:
    trace = regular(n_expert=4, k=4, tokens=10)
    pq.write_table(to_arrow(trace), tmp_path / "t.parquet")
    options = ImportOptions(n_expert=4, drop_dummies=True)
    assert_same(import_trace("parquet", tmp_path / "t.parquet", options), trace)


def test_every_importer_is_offered() -> None:
    from simlab.cli.import_ import command

    (option,) = [p for p in command.params if p.name == "source_kind"]
    assert list(option.type.choices) == list(IMPORTERS)  # type: ignore[attr-defined]
