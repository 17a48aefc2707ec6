"""Trace files: what is written is read back, the hash, and other programs' Parquet."""

from __future__ import annotations

import hashlib
import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from trace_cases import assert_same, make, random_traces, regular, rows_of, temporaries

from simlab.errors import TraceError, UsageError
from simlab.trace import arrow, sink
from simlab.trace.arrow import from_arrow, offsets_of, to_arrow
from simlab.trace.hash import ContentHash, columns_of, content_hash
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.trace.write import write_trace


def naive_hash(trace: Trace) -> str:
    """The content hash in the words of its definition."""
    rows = rows_of(trace)
    columns = {
        "request": b"".join(struct.pack("<i", row[0]) for row in rows),
        "token": b"".join(struct.pack("<i", row[1]) for row in rows),
        "phase": bytes(row[2] for row in rows),
        "layer": b"".join(struct.pack("<h", row[3]) for row in rows),
        "lengths": b"".join(struct.pack("<H", len(row[4])) for row in rows),
        "experts": b"".join(struct.pack("<H", e) for row in rows for e in row[4]),
    }
    if trace.weights is not None:
        columns["weights"] = trace.weights.astype("<f2").tobytes()
    if trace.step is not None:
        columns["step"] = trace.step.astype("<i4").tobytes()
    text = "".join(f"{name}:{hashlib.sha256(raw).hexdigest()}\n" for name, raw in columns.items())
    return hashlib.sha256(text.encode()).hexdigest()


@settings(max_examples=80, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(trace=random_traces())
def test_round_trip(trace: Trace, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "round-trip.parquet"
    stored = write_trace(trace, path)
    assert stored == trace.meta.with_(content_hash=naive_hash(trace))
    for cache in (False, True, True):  # decoded, decoded into the cache, from the cache
        found = read_trace(path, cache=cache)
        assert found.meta == stored
        assert_same(found, trace)


@settings(max_examples=60, deadline=None)
@given(trace=random_traces())
def test_tables_in_pieces_and_parts_of_tables(trace: Trace) -> None:
    table = to_arrow(trace)
    large = pa.LargeListArray.from_arrays(trace.offsets, trace.experts)
    for kind in (table, table.set_column(4, "experts", large)):
        doubled = pa.concat_tables([kind.slice(1), kind, kind.slice(0, 1)])
        for part in (doubled, doubled.combine_chunks()):
            found = from_arrow(part.slice(trace.n_rows - 1, trace.n_rows), trace.meta)
            assert_same(found, trace)
    assert from_arrow(table.slice(0, 0), trace.meta).n_rows == 0


@settings(max_examples=60, deadline=None)
@given(trace=random_traces())
def test_arrow_and_frames_round_trip(trace: Trace) -> None:
    table = to_arrow(trace)
    table.validate(full=True)
    assert_same(from_arrow(table, trace.meta), trace)
    assert_same(from_arrow(trace.to_polars().to_arrow(), trace.meta), trace)
    frame = trace.to_pandas()
    assert [list(row) for row in frame["experts"]] == [row[4] for row in rows_of(trace)]


def test_row_groups_and_pieces_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trace = regular(5, 40, 3)
    rows = list(enumerate(rows_of(trace)))
    ragged = make([row if i % 7 else (*row[:4], row[4][:1]) for i, row in rows], 16, k=4)
    hollow = make([row if i % 3 else (*row[:4], []) for i, row in rows], 16)
    for size in (1, 7, 64, 10_000):
        monkeypatch.setattr(arrow, "BATCH_ROWS", size)
        monkeypatch.setattr(sink, "BATCH_ROWS", size)
        monkeypatch.setattr(arrow.batches_of, "__defaults__", (size,))
        for number, wanted in enumerate((trace, ragged, hollow)):
            path = tmp_path / f"{size}-{number}.parquet"
            assert write_trace(wanted, path).content_hash == naive_hash(wanted)
            assert pq.read_metadata(path).num_row_groups == -(-wanted.n_rows // size)
            assert_same(read_trace(path, cache=False), wanted)


def test_the_hash_of_pieces_is_the_hash_of_the_whole() -> None:
    trace = replace(regular(), step=np.arange(240, dtype=np.int32))
    whole = columns_of(trace)
    digest = ContentHash(step=True)
    for start in range(0, 240, 50):
        part: dict = {n: None if c is None else c[start : start + 50] for n, c in whole.items()}
        part["experts"] = trace.experts[start * 4 : (start + 50) * 4]
        digest.update(part)
    assert digest.hexdigest() == content_hash(trace) == naive_hash(trace)
    assert content_hash(replace(trace, step=None)) != content_hash(trace)
    assert content_hash(replace(trace, meta=trace.meta.with_(model="other"))) == content_hash(trace)


def test_the_file_is_plain_parquet(tmp_path: Path) -> None:
    trace = replace(regular(), weights=np.linspace(0, 1, 960).astype(np.float16))
    write_trace(trace, tmp_path / "t.parquet")
    kinds = pq.read_schema(tmp_path / "t.parquet")
    assert [(f.name, str(f.type)) for f in kinds] == [
        ("request", "int32"),
        ("token", "int32"),
        ("phase", "uint8"),
        ("layer", "int16"),
        ("experts", "list<element: uint16 not null>"),
        ("weights", "list<element: halffloat not null>"),
    ]
    column = pq.read_metadata(tmp_path / "t.parquet").row_group(0).column(4)
    assert column.compression == "ZSTD"
    assert pl.read_parquet(tmp_path / "t.parquet")["experts"].to_list() == [
        row[4] for row in rows_of(trace)
    ]
    assert len(pd.read_parquet(tmp_path / "t.parquet")) == trace.n_rows


INTEGERS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(),
            pa.uint64()]  # fmt: skip


@pytest.mark.parametrize("kind", INTEGERS, ids=str)
@pytest.mark.parametrize("shape", ["list", "large", "fixed", "plain"])
def test_any_integer_and_list_type_is_read(tmp_path: Path, kind: pa.DataType, shape: str) -> None:
    trace = regular()
    rows = rows_of(trace)
    made = {
        "list": pa.list_(kind),
        "large": pa.large_list(kind),
        "fixed": pa.list_(kind, 4),
        "plain": pa.list_(pa.field("array", kind, nullable=False)),
    }[shape]
    table = pa.table(
        {
            "note": ["a column that nobody knows"] * len(rows),
            "experts": pa.array([row[4] for row in rows], made),
            "layer": pa.array([row[3] for row in rows], kind),
            "phase": pa.array([row[2] for row in rows], kind),
            "token": pa.array([row[1] for row in rows], kind),
            "request": pa.array([row[0] for row in rows], kind),
        }
    )
    path = tmp_path / "t.parquet"
    # the Arrow types are stored as well, or given up: both must be read
    for store in (True, False):
        pq.write_table(table, path, row_group_size=100, store_schema=store)
        found = read_trace(path, n_expert=16, cache=False)
        assert_same(found, trace)
        assert (found.meta.k, found.meta.moe_layers) == (4, (0, 1, 2, 3))
        assert found.meta.content_hash == content_hash(trace)


def test_without_phase_rows_are_decode_unless_said(tmp_path: Path) -> None:
    table = to_arrow(regular()).drop_columns(["phase"])
    path = tmp_path / "t.parquet"
    pq.write_table(table, path)
    assert (read_trace(path, n_expert=16).phase == 1).all()
    assert (read_trace(path, n_expert=16, phase=0).phase == 0).all()
    assert (read_trace(path, n_expert=16).phase == 1).all()


def test_n_expert_is_needed_without_metadata_and_must_agree_with_it(tmp_path: Path) -> None:
    pq.write_table(to_arrow(regular()), tmp_path / "bare.parquet")
    with pytest.raises(UsageError, match=r"bare\.parquet has no simlab metadata.*--n-expert N"):
        read_trace(tmp_path / "bare.parquet")
    for impossible in (0, 65537):
        with pytest.raises(UsageError, match=r"--n-expert must be 1\.\.65536"):
            read_trace(tmp_path / "bare.parquet", n_expert=impossible)
    write_trace(regular(), tmp_path / "full.parquet")
    assert read_trace(tmp_path / "full.parquet", n_expert=16).meta.n_expert == 16
    with pytest.raises(UsageError, match="says n_expert = 16"):
        read_trace(tmp_path / "full.parquet", n_expert=64)


def test_an_invalid_trace_is_not_written(tmp_path: Path) -> None:
    good = regular()
    backwards = good.layer[::-1].copy()
    bad = {
        "not sorted": replace(good, layer=backwards),
        "k = 2": replace(good, meta=good.meta.with_(k=2)),
        "n_expert is 9": replace(good, meta=good.meta.with_(n_expert=9)),
        "MoE layer": replace(good, meta=good.meta.with_(moe_layers=(0, 1, 2))),
        "must be int32": replace(good, token=good.token.astype(np.int64)),
        r"must be uint16 \[960\]": replace(good, experts=good.experts.astype(np.int32)),
        "weights must be": replace(good, weights=np.zeros(3, np.float16)),
        "request is negative": replace(good, request=good.request - np.int32(1)),
        "phase is not 0 or 1": replace(good, phase=good.phase + np.uint8(1)),
        "offsets must ascend": replace(good, offsets=good.offsets + 1),
        "empty": make([(0, 0, 1, 0, [])]),
    }
    for message, trace in bad.items():
        with pytest.raises(TraceError, match=message):
            write_trace(trace, tmp_path / "t.parquet")
    assert not list(tmp_path.iterdir())


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "t.parquet"
    write_trace(regular(seed=1), path)
    before = path.read_bytes()

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(pq.ParquetWriter, "write_batch", full)
        with pytest.raises(TraceError, match=r"cannot write .*t\.parquet: No space left on device"):
            write_trace(regular(seed=2), path)
    assert path.read_bytes() == before
    assert not temporaries(tmp_path)
    with pytest.raises(UsageError, match="does not exist"):
        write_trace(regular(), tmp_path / "absent" / "t.parquet")
    (tmp_path / "folder").mkdir()
    with pytest.raises(UsageError, match=f"{tmp_path / 'folder'} is a folder"):
        write_trace(regular(), tmp_path / "folder")
    assert not temporaries(tmp_path)


def test_offsets_of_lengths() -> None:
    for lengths in ([], [0], [3], [0, 0], [2, 2, 2], [1, 0, 5], [65535, 65535]):
        wanted = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]).astype(np.int64)
        found = offsets_of(np.array(lengths, np.uint16))
        assert found.dtype == np.int64
        assert found.tolist() == wanted.tolist()
