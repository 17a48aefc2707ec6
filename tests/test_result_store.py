"""Result files: what is written is read again, whole or not at all, and damage is one line."""

from __future__ import annotations

import errno
import json
import os
from dataclasses import asdict, replace
from pathlib import Path

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from factories import make_counters, make_result

from simlab.errors import SimlabError, UsageError
from simlab.result.schema import Counters, Result
from simlab.result.store import (
    read_results,
    results_to_pandas,
    results_to_polars,
    write_results,
)
from simlab.whole_file import write_atomically

SUFFIXES = (".json", ".parquet")


@pytest.fixture
def rows() -> list[Result]:
    """Rows that differ in every optional thing."""
    first = make_result(params={"half_life": 16.0, "pull": 0.5}, notes=("clipped", "Größe"))
    return [
        first,
        make_result("opt", (96, 48), 0.75, concurrency=4, policy_hash='"<b>\n'),
        make_result("lfu-decay", declined=0.9, kind="measured", synthetic=True),
        replace(
            first,
            hit_rate=None,
            mib_per_token=None,
            counters=replace(first.counters, bytes_moved=None),
            capacity_bytes=None,
            by_layer=[],
            by_class={},
            windows=[],
            provenance={},
            params={},
            notes=(),
        ),
    ]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_round_trip(tmp_path: Path, suffix: str, rows: list[Result]) -> None:
    path = tmp_path / f"results{suffix}"
    write_results(rows, path)
    assert read_results(path) == rows
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_no_rows_round_trip(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"results{suffix}"
    write_results([], path)
    assert read_results(path) == []


def test_json_is_a_list_of_rows_as_to_dict_gives_them(tmp_path: Path, rows: list[Result]) -> None:
    path = tmp_path / "r.json"
    write_results(rows, path)
    assert json.loads(path.read_text()) == [row.to_dict() for row in rows]


def test_polars_filters_a_parquet_file_by_plain_columns(tmp_path: Path, rows: list[Result]) -> None:
    path = tmp_path / "r.parquet"
    write_results(rows, path)
    found = pl.scan_parquet(path).filter(pl.col("policy") == "opt", pl.col("concurrency") == 4)
    frame = found.collect()
    assert frame["hits"].to_list() == [rows[1].counters.hits]
    assert frame["slots_json"].to_list() == [[96, 48]]
    assert json.loads(frame["by_class"][0]) == {"<=8": asdict(rows[1].counters)}
    assert pl.read_parquet(path)["hit_rate"].null_count() == 1


def test_flat_tables(rows: list[Result]) -> None:
    frame = results_to_polars(rows)
    table = results_to_pandas(rows)
    assert frame.height == len(table) == len(rows)
    assert list(table.columns) == frame.columns
    assert frame["misses"].to_list() == [row.counters.misses for row in rows]
    assert table["policy"].tolist() == [row.policy for row in rows]
    assert frame["hit_rate"].to_list() == [row.hit_rate for row in rows]
    assert frame["slots_json"].to_list() == [list(row.slots) for row in rows]
    assert json.loads(frame["params_json"][0]) == rows[0].params
    assert not {"by_layer", "by_class", "provenance"} & set(frame.columns)
    assert set(asdict(rows[0].counters)) <= set(frame.columns)
    assert results_to_polars([]).columns == frame.columns


@pytest.mark.parametrize("name", ["results", "results.csv", "results.json.gz"])
def test_other_suffixes_are_refused_by_name(tmp_path: Path, name: str, rows: list[Result]) -> None:
    with pytest.raises(UsageError, match=r"\.json or \.parquet"):
        write_results(rows, tmp_path / name)
    with pytest.raises(UsageError, match=r"\.json or \.parquet"):
        read_results(tmp_path / name)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_missing_folder_and_missing_file(tmp_path: Path, suffix: str, rows: list[Result]) -> None:
    with pytest.raises(UsageError, match="create it"):
        write_results(rows, tmp_path / "nowhere" / f"r{suffix}")
    with pytest.raises(UsageError, match="no result file"):
        read_results(tmp_path / f"r{suffix}")
    (tmp_path / f"folder{suffix}").mkdir()
    with pytest.raises(UsageError, match="is a folder"):
        write_results(rows, tmp_path / f"folder{suffix}")
    with pytest.raises(UsageError, match="no result file"):
        read_results(tmp_path / f"folder{suffix}")


def test_a_full_disk_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rows: list[Result]
) -> None:
    path = tmp_path / "r.json"
    write_results(rows[:1], path)

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(SimlabError, match="No space left") as caught:
        write_results(rows, path)
    assert caught.value.exit_code == 1
    assert [p.name for p in tmp_path.iterdir()] == ["r.json"]
    assert read_results(path) == rows[:1]


def test_an_interrupted_write_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "page.html", b"x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_every_cut_of_a_file_is_refused_in_one_line(
    tmp_path: Path, suffix: str, rows: list[Result]
) -> None:
    path = tmp_path / f"r{suffix}"
    write_results(rows, path)
    body = path.read_bytes()
    for part in range(64):
        path.write_bytes(body[: len(body) * part // 64])
        with pytest.raises(SimlabError, match=path.name) as caught:
            read_results(path)
        assert "\n" not in str(caught.value)


def test_flipped_bits_in_a_parquet_page_are_noticed(tmp_path: Path, rows: list[Result]) -> None:
    path = tmp_path / "r.parquet"
    write_results(rows, path)
    body = path.read_bytes()
    column = pq.read_metadata(path).row_group(0).column(0)
    start = column.dictionary_page_offset or column.data_page_offset
    damaged = bytearray(body)
    damaged[start + column.total_compressed_size - 2] ^= 0x10
    path.write_bytes(damaged)
    with pytest.raises(SimlabError, match="cannot read results"):
        read_results(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot read results"),
        ("{}", "not a list"),
        ("[1]", "row 1: not an object"),
        ("[{}]", "row 1: not a simlab result row"),
        ("[" * 100_000, "cannot read results"),
        ("\xff\xfe", "cannot read results"),
    ],
)
def test_foreign_json(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(SimlabError, match=words):
        read_results(path)


def test_foreign_parquet(tmp_path: Path) -> None:
    path = tmp_path / "r.parquet"
    pq.write_table(pa.table({"request": [1, 2]}), path)
    with pytest.raises(SimlabError, match="no column 'policy'"):
        read_results(path)
    path.write_text("[]")
    with pytest.raises(SimlabError, match="cannot read results"):
        read_results(path)


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("hits", 7, "do not add up"),
        ("hits", "7", "hits must be of type int"),
        ("hit_rate", "high", "hit_rate must be of type float"),
        ("hit_rate", float("nan"), "hit_rate must be of type float"),
        ("misses", 2**70, "misses must be of type int"),
        ("policy", None, "policy must be of type str"),
        ("bound", 1, "bound must be of type bool"),
        ("slots_json", [], "at least one group"),
        ("slots_json", ["many"], "slots_json must be a list of int"),
        ("params_json", {"a": "b"}, "params_json must hold numbers"),
        ("by_class", [], "by_class must be an object"),
        ("by_class", {"<=8": {"hits": "all"}}, "by_class must hold numbers"),
        ("by_layer", {}, "by_layer must be a list"),
        ("by_layer", [{"layer": 1}], "by_layer must name"),
        ("windows", [3], "windows must hold numbers"),
        ("provenance", "me", "provenance must be an object"),
        ("kind", "guessed", "kind must be one of"),
        ("schema_version", 99, "newer schema"),
        ("n_keys", 0, "at least one key"),
    ],
)
def test_rows_with_wrong_values(tmp_path: Path, field: str, value: object, words: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{**make_result().to_dict(), field: value}]))
    with pytest.raises(SimlabError, match=words) as caught:
        read_results(path)
    assert "row 1" in str(caught.value)


def test_unknown_keys_are_ignored(tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps([{**make_result().to_dict(), "later": [1]}]))
    assert read_results(path) == [make_result()]


def test_crafted_rows_conserve_lookups() -> None:
    for declined in (0, 300):
        for on_decline in ("cpu", "stream"):
            make_counters(1000, 400, declined, on_decline).check("a crafted row")
    with pytest.raises(SimlabError):
        Counters(lookups=3, hits=1, misses=2, demand_uploads=1).check("a wrong one")
