"""Damaged, foreign and impossible trace files: one line each, no crash, nothing unnoticed."""

from __future__ import annotations

import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from trace_cases import Row, make, regular, rows_of

from simlab.cli import main
from simlab.errors import SimlabError, TraceError
from simlab.trace import arrow, sink
from simlab.trace.arrow import to_arrow
from simlab.trace.read import read_trace
from simlab.trace.schema import TraceMeta
from simlab.trace.write import write_trace


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A valid file of several row groups, with every column."""
    path = tmp_path_factory.mktemp("good") / "t.parquet"
    plain = regular(4, 30, 5, tags={"0": "prose"}, notes=("kept",))
    trace = plain.__class__(
        **{**vars(plain), "weights": np.linspace(0, 1, plain.n_picks).astype(np.float16),
           "step": plain.token.copy()}
    )  # fmt: skip
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sink, "BATCH_ROWS", 200)
        patch.setattr(arrow.batches_of, "__defaults__", (200,))
        write_trace(trace, path)
    assert pq.read_metadata(path).num_row_groups == 3
    return path.read_bytes()


def refusal(path: Path, **options: Any) -> str:
    """The message with which a file is refused; one line that names it."""
    with pytest.raises(TraceError) as caught:
        read_trace(path, cache=False, **options)
    text = str(caught.value)
    assert "\n" not in text
    assert str(path) in text
    return text


def test_truncated_at_64_places(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    rnd = Random(1)
    places = [0, 1, 4, 8, 11, 12, len(good) - 1, len(good) - 4, len(good) - 8]
    places += [rnd.randrange(len(good)) for _ in range(64 - len(places))]
    for place in places:
        path.write_bytes(good[:place])
        assert refusal(path)


def _flip(task: tuple[bytes, int, str]) -> str:
    """What reading says after one flip: "same", or the message; anything else is a failure."""
    good, bit, folder = task
    signal.alarm(20)  # a hang ends the process, and the test
    damaged = bytearray(good)
    damaged[bit >> 3] ^= 1 << (bit & 7)
    path = Path(folder) / f"{bit}.parquet"
    path.write_bytes(damaged)
    try:
        trace = read_trace(path, cache=False, n_expert=16)
    except SimlabError as exc:
        return f"{type(exc).__name__}: {exc}"
    finally:
        path.unlink()
        signal.alarm(0)
    return f"read: {trace.meta.to_json()} {trace.n_rows}"


def flipped(good: bytes, count: int, folder: Path) -> list[str]:
    """What reading says after each of so many flips, half of them in the footer."""
    rnd = Random(2)
    footer = (len(good) - 8 - int.from_bytes(good[-8:-4], "little")) * 8
    bits = [rnd.randrange(footer if i % 2 else 0, len(good) * 8) for i in range(count)]
    # unlike a multiprocessing.Pool this one notices when a worker crashes
    with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("fork")) as pool:
        return list(pool.map(_flip, [(good, bit, str(folder)) for bit in bits]))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")
def test_500_bit_flips(good: bytes, tmp_path: Path) -> None:
    whole = tmp_path / "t.parquet"
    whole.write_bytes(good)
    trace = read_trace(whole, cache=False)
    unharmed = f"read: {trace.meta.to_json()} {trace.n_rows}"
    outcomes = flipped(good, 500, tmp_path)
    for outcome in outcomes:
        # a flip in the mark of the seal changes nothing; everything else is noticed
        assert outcome == unharmed or outcome.startswith("TraceError"), outcome
        assert "\n" not in outcome
    assert sum(outcome == unharmed for outcome in outcomes) < 10


@pytest.mark.skipif(not hasattr(os, "fork"), reason="the workers are forked")
def test_bit_flips_in_files_of_others(tmp_path: Path) -> None:
    """Without checksums not every flip can be noticed, but none may crash."""
    path = tmp_path / "t.parquet"
    pq.write_table(to_arrow(regular(4, 30, 5)), path, row_group_size=200)
    for outcome in flipped(path.read_bytes(), 300, tmp_path):
        assert outcome.startswith(("TraceError", "read: ")), outcome
        assert "\n" not in outcome


def test_what_is_not_a_trace_file(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    assert "No such file" in refusal(path)
    assert "it is a folder, not a file" in refusal(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    assert "it is a device, not a file" in refusal(tmp_path / "pipe")
    contents = {
        b"": "empty",
        b"P": "not a Parquet file",
        b"PAR1": "cut off",
        b"PAR1PAR1": "cut off",
        b"\x89PNG\r\n\x1a\n" + bytes(64): "not a Parquet file; 'simlab import'",
        bytes(5000): "not a Parquet file",
        b"PAR1" + bytes(100) + b"\xff\xff\xff\xffPAR1": "cut off",
        b"PAR1" + bytes(100) + b"\x20\x00\x00\x00PAR1": "damaged",
        good[:-4] + b"PARE": "cut off",
    }
    for content, words in contents.items():
        path.write_bytes(content)
        assert words in refusal(path), content[:20]
    table = pa.table({"a": [1, 2]})
    with pa.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    assert "simlab trace recover" in refusal(path)
    pq.write_table(table, path)
    assert "no column 'request'" in refusal(path, n_expert=4)
    if os.geteuid() != 0:
        path.chmod(0)
        assert "Permission denied" in refusal(path)


def test_a_changed_pick_or_metadata_is_noticed(good: bytes, tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    path.write_bytes(good)
    table = pq.read_table(path)
    pairs = dict(pq.read_metadata(path).metadata)
    experts = table["experts"].to_pylist()
    experts[7] = [e for e in range(16) if e not in experts[7]][:4]

    def write(table: pa.Table, pairs: dict[bytes, bytes]) -> None:
        pq.write_table(table.replace_schema_metadata(pairs), path)

    write(table, pairs)
    assert read_trace(path, cache=False).meta.tags == {"0": "prose"}
    changed = table.set_column(4, "experts", pa.array(experts, table.schema.field("experts").type))
    write(changed, pairs)
    assert "its picks are not those that were written" in refusal(path)
    write(table.drop_columns(["weights"]), pairs)
    assert "its picks are not those that were written" in refusal(path)
    path.write_bytes(good.replace(b"prose", b"verse"))
    assert "its footer is not what was written" in refusal(path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"format_version": 99}, "newer than this simlab"),
        ({"n_expert": "many"}, "metadata is damaged"),
        ({"n_expert": 0}, "n_expert must be"),
        ({"k": 17}, "k must be"),
        ({"moe_layers": [3, 2]}, "ascending"),
        ({"expert_bytes": [[1]]}, "expert_bytes names 1 layers"),
        ({"kind": "dreamt"}, "kind must be"),
    ],
)
def test_impossible_metadata(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    import json

    table = to_arrow(regular())
    meta = json.loads(regular().meta.to_json()) | change
    path = tmp_path / "t.parquet"
    pq.write_table(table.replace_schema_metadata({"simlab": json.dumps(meta)}), path)
    assert words in refusal(path)
    pq.write_table(table.replace_schema_metadata({"simlab": "{" * 100_000}), path)
    assert "metadata is damaged" in refusal(path)


def _with(index: int, **changes: Any) -> Callable[[list[Row]], list[Row]]:
    names = ["request", "token", "phase", "layer", "experts"]

    def change(rows: list[Row]) -> list[Row]:
        row = list(rows[index])
        for name, value in changes.items():
            row[names.index(name)] = value
        return [*rows[:index], tuple(row), *rows[index + 1 :]]  # type: ignore[list-item]

    return change


BAD_ROWS: dict[str, tuple[Callable[[list[Row]], list[Row]], str]] = {
    "id too large": (
        _with(6, experts=[1, 16, 2]),
        r"row 6 \(request 0, token 1, layer 2\) picks expert 16, but n_expert is 16 ",
    ),
    "id repeated": (
        _with(9, experts=[5, 2, 5, 1]),
        r"row 9 \(request 0, token 2, layer 1\) picks expert 5 more than once",
    ),
    "id repeated in a short row": (
        _with(9, experts=[7, 7]),
        r"row 9 \(request 0, token 2, layer 1\) picks expert 7 more than once",
    ),
    "id negative": (_with(5, experts=[1, -2]), r"an expert id is negative \(-2\) at row 5"),
    "id huge": (_with(5, experts=[2**40]), "an expert id is 1099511627776.* at row 5"),
    "request negative": (_with(0, request=-1), r"request is negative \(-1\) at row 0"),
    "token huge": (_with(3, token=2**33), "token is 8589934592, the most is 2147483647 at row 3"),
    "layer huge": (_with(3, layer=40000), "layer is 40000, the most is 32767 at row 3"),
    "phase 2": (_with(3, phase=2), "phase is 2, the most is 1 at row 3"),
    "phases mixed": (
        lambda rows: _with(3, phase=1 - rows[3][2])(rows),
        r"row 3 \(request 0, token 0, layer 3\) is of another phase",
    ),
    "row twice": (
        lambda rows: [*rows[:5], rows[4], *rows[5:]],
        r"two rows for one .* the second is row 5 \(request 0, token 1, layer 0\)",
    ),
    "two rows swapped": (
        lambda rows: [*rows[:8], rows[9], rows[8], *rows[10:]],
        r"not sorted by \(request, token, layer\), first at row 9 .*'simlab import' sorts",
    ),
    "shuffled": (
        lambda rows: Random(3).sample(rows, len(rows)),
        r"not sorted by \(request, token, layer\), first at row 2 ",
    ),
    "no picks": (lambda rows: [(*row[:4], []) for row in rows], "empty: it holds no pick"),
    "no rows": (lambda rows: [], "empty: it holds no row"),
}


@pytest.mark.parametrize("name", BAD_ROWS)
@pytest.mark.parametrize("group", [2, 9, 1000])
def test_rows_that_make_no_trace(name: str, group: int, tmp_path: Path) -> None:
    change, words = BAD_ROWS[name]
    rows = change(rows_of(regular()))
    table = pa.table(
        {
            "request": pa.array([row[0] for row in rows], pa.int64()),
            "token": pa.array([row[1] for row in rows], pa.int64()),
            "phase": pa.array([row[2] for row in rows], pa.int64()),
            "layer": pa.array([row[3] for row in rows], pa.int64()),
            "experts": pa.array([row[4] for row in rows], pa.list_(pa.int64())),
        }
    )
    pq.write_table(table, tmp_path / "t.parquet", row_group_size=group)
    with pytest.raises(TraceError, match=words):
        read_trace(tmp_path / "t.parquet", n_expert=16)


@pytest.mark.parametrize("k", [2, 3, 8, 20, 21, 200])
def test_a_repeated_id_is_found_wherever_it_is(k: int) -> None:
    from simlab.trace.validate import check_picks

    rng = np.random.default_rng(k)
    picks = np.argsort(rng.random((40, 256)), axis=1)[:, :k].astype(np.uint16)
    lengths = np.full(40, k, np.uint16)
    check_picks(picks.reshape(-1), lengths, 256, k, str)
    for first, second in {(0, 1), (0, k - 1), (k // 2, k - 1), (k - 2, k - 1)}:
        bad = picks.copy()
        bad[23, second] = bad[23, first]
        if first != second:
            with pytest.raises(TraceError, match=rf"^23 picks expert {bad[23, first]} more than"):
                check_picks(bad.reshape(-1), lengths, 256, k, str)
            # the same among rows of other lengths
            flat = np.concatenate([bad.reshape(-1), [1]]).astype(np.uint16)
            with pytest.raises(TraceError, match=r"^23 picks"):
                check_picks(flat, np.append(lengths, 1).astype(np.uint16), 256, k, str)


BAD_CELLS: dict[str, tuple[str, pa.Array, str]] = {
    "no number": ("token", pa.array([0, None, 2], pa.int32()), "'token' has no value at row 1"),
    "no list": ("experts", pa.array([[1], [2], None]), "'experts' has no list at row 2"),
    "hole in a list": ("experts", pa.array([[1], [2, None], [3]]), "absent number .* at row 1"),
    "floats": ("layer", pa.array([0.0, 1.0, 2.0]), "'layer' holds double, not integers"),
    "text": ("request", pa.array(["a", "b", "c"]), "'request' holds string, not integers"),
    "no lists": ("experts", pa.array([1, 2, 3]), "'experts' holds int64, not lists of integers"),
    "lists of text": ("experts", pa.array([["a"], ["b"], ["c"]]), "not lists of integers"),
    "weights short": ("weights", pa.array([[0.5], [0.5], []]), "row 2 has not as many weights"),
    "weights whole": ("weights", pa.array([[1], [1], [1]]), "not lists of floating-point numbers"),
}


@pytest.mark.parametrize("name", BAD_CELLS)
def test_cells_of_the_wrong_kind(name: str, tmp_path: Path) -> None:
    column, values, words = BAD_CELLS[name]
    cells: dict[str, pa.Array] = {
        "request": pa.array([0, 0, 0]),
        "token": pa.array([0, 1, 2]),
        "layer": pa.array([4, 4, 4]),
        "experts": pa.array([[1], [2], [3]]),
    }
    pq.write_table(pa.table({**cells, column: values}), tmp_path / "t.parquet")
    with pytest.raises(TraceError, match=words):
        read_trace(tmp_path / "t.parquet", n_expert=4)


@pytest.mark.parametrize("column", ["request", "token", "layer", "experts"])
def test_missing_and_doubled_columns(column: str, tmp_path: Path) -> None:
    table = to_arrow(regular())
    pq.write_table(table.drop_columns([column]), tmp_path / "t.parquet")
    assert f"no column '{column}'" in refusal(tmp_path / "t.parquet", n_expert=16)
    doubled = table.append_column(column, table[column])
    pq.write_table(doubled, tmp_path / "t.parquet")
    assert f"column '{column}' more than once" in refusal(tmp_path / "t.parquet", n_expert=16)


def test_rows_beyond_the_metadata(tmp_path: Path) -> None:
    import json

    trace = make([(0, 0, 1, 2, [0, 1, 2]), (0, 0, 1, 5, [1])])
    for change, words in (
        ({"k": 2}, "has 3 picks, more than the trace's k = 2"),
        ({"moe_layers": [2, 4]}, r"row 1 (request 0, token 0, layer 5) is not of a MoE layer"),
        ({"n_expert": 2, "k": 2}, "has 3 picks"),
    ):
        meta = TraceMeta.from_json(json.dumps(json.loads(trace.meta.to_json()) | change))
        table = to_arrow(trace).replace_schema_metadata({"simlab": meta.to_json()})
        pq.write_table(table, tmp_path / "t.parquet")
        assert words in refusal(tmp_path / "t.parquet")


def test_a_footer_that_announces_too_much_is_no_allocation(tmp_path: Path) -> None:
    from simlab.trace.read import group_starts

    class Group:
        num_rows = 2**40

    class Footer:
        num_row_groups = 1
        num_rows = 2**40

        def row_group(self, _: int) -> Group:
            return Group()

    for announced in (2**40, -1):
        Footer.num_rows = Group.num_rows = announced
        with pytest.raises(TraceError, match="impossible number of rows"):
            group_starts(Footer(), 100_000)
    Footer.num_rows = 7
    with pytest.raises(TraceError, match="impossible number of rows"):
        group_starts(Footer(), 100_000)


def test_the_command_says_it_in_one_line(
    good: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = tmp_path / "cut.parquet"
    cut.write_bytes(good[:3000])
    bare = tmp_path / "bare.parquet"
    pl.DataFrame({"request": [0], "token": [0], "layer": [0], "experts": [[1]]}).write_parquet(bare)
    for args, code, words in (
        (["inspect", str(cut)], 1, "cut off"),
        (["inspect", str(tmp_path / "none")], 1, "No such file"),
        (["inspect", str(bare)], 2, "--n-expert"),
        (["inspect", str(bare), "--n-expert", "1"], 1, "n_expert is 1"),
        (["trace", "slice", str(cut), "-o", str(tmp_path / "x")], 1, "cut off"),
    ):
        assert main(args) == code
        caught = capsys.readouterr()
        assert caught.out == ""
        assert words in caught.err
        assert caught.err.count("\n") == 1
        assert "Traceback" not in caught.err
