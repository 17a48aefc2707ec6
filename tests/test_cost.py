"""The time model: links fitted to copies, profiles in files, and milliseconds from counters."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from factories import make_result
from hypothesis import given
from hypothesis import strategies as st

from simlab.cost.link import LinkProfile, fit_link, read_profile, write_profile
from simlab.cost.model import Costs, Work, calibrated, costs_of, predicted_row, work_of
from simlab.errors import SimlabError, UsageError
from simlab.model.layout import ExpertGroup, ExpertLayout
from simlab.result.schema import Counters

PROFILE = LinkProfile(
    device="cuda",
    name="a test device",
    note="",
    peak_gb_s=26.0,
    bandwidth_gb_s=25.0,
    latency_us=8.0,
    ids_wait_us=12.0,
    limit_gb_s=31.5,
    limit_source="given",
    valid=True,
    problems=(),
    points=[{"size": 4096, "us": 8.2}],
    provenance={"command": "simlab probe"},
)


@given(st.floats(0.5, 500), st.floats(0, 100))
def test_the_fit_finds_the_link_that_made_the_times(bandwidth: float, latency: float) -> None:
    sizes = [4096 * 4**i for i in range(9)]
    seconds = [latency * 1e-6 + size / bandwidth / 1e9 for size in sizes]
    found = fit_link(sizes, seconds)
    assert found == (pytest.approx(bandwidth, rel=1e-6), pytest.approx(latency, abs=1e-3))


def test_a_latency_is_never_negative() -> None:
    sizes = [2**20, 2**24]
    bandwidth, latency = fit_link(sizes, [0.5e-4, 1.7e-3])
    assert latency == 0
    assert 9 < bandwidth < 22


def test_times_that_do_not_grow_are_refused() -> None:
    with pytest.raises(SimlabError, match="took no longer"):
        fit_link([2**10, 2**20, 2**30], [3.0, 0.1, 0.001])


def test_a_profile_survives_its_file(tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    write_profile(PROFILE, path)
    assert read_profile(path) == PROFILE


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"what": "results"}, "not a link profile"),
        ({"version": 99}, "newer version"),
        ({"bandwidth_gb_s": 0}, "bandwidth is 0"),
        ({"bandwidth_gb_s": "fast"}, "not numbers"),
        ({"latency_us": None}, "not numbers"),
        ({"surprise": 1}, "surprise"),
        ({"problems": 3}, "not iterable"),
        (
            {"valid": False, "problems": ["above the limit"]},
            r"invalid \(above the limit\); run simlab probe again",
        ),
    ],
    ids=lambda value: str(next(iter(value))) if isinstance(value, dict) else "",
)
def test_a_profile_that_cannot_be_used_says_why(
    change: dict[str, object], words: str, tmp_path: Path
) -> None:
    path = tmp_path / "link.json"
    path.write_text(json.dumps({**PROFILE.to_dict(), **change}))
    with pytest.raises(SimlabError, match=words):
        read_profile(path)


@pytest.mark.parametrize("text", ["", "[]", "{", "{}", "null", '{"what": "link profile"}'])
def test_a_damaged_profile_is_one_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "link.json"
    path.write_text(text)
    with pytest.raises(SimlabError, match="run simlab probe again") as failure:
        read_profile(path)
    assert "\n" not in str(failure.value)


def test_a_missing_profile(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="simlab probe --out"):
        read_profile(tmp_path / "none.json")


WORK = Work(steps=100, tokens=400, lookups=30_000, n_bytes=10**11, copies=60_000)


def test_the_terms_add_up() -> None:
    costs = Costs(bandwidth_gb_s=25, latency_us=5, step_ms=10, lookup_ms=0.01, overlap=0.25)
    uploads = 1e11 / 25e9 * 1e3 + 60_000 * 0.005  # 4000 ms + 300 ms
    assert costs.upload_ms(WORK) == pytest.approx(uploads)
    expected = (100 * 10 + 30_000 * 0.01 + 0.75 * uploads) / 400
    assert costs.ms_per_token(WORK) == pytest.approx(expected)


def test_calibration_reproduces_the_point_and_leaves_uploads_alone() -> None:
    costs = costs_of(PROFILE)
    found = calibrated(costs, [(WORK, 20.0)])
    assert found.ms_per_token(WORK) == pytest.approx(20.0)
    assert found.upload_ms(WORK) == costs.upload_ms(WORK)
    other = replace(WORK, n_bytes=2 * 10**11, copies=120_000)
    more = costs.upload_ms(WORK) / 400
    assert found.ms_per_token(other) == pytest.approx(20.0 + more)
    assert calibrated(costs, [(WORK, 0.001)]).step_ms == 0  # faster than the link: not negative
    with pytest.raises(SimlabError, match="decode step"):
        calibrated(costs, [])


def layout(*tensors: int) -> ExpertLayout:
    groups = tuple(ExpertGroup((2 * i, 2 * i + 1), (100,) * n) for i, n in enumerate(tensors))
    return ExpertLayout(8, 2, groups)


def test_work_counts_a_copy_per_tensor_and_run_and_per_streamed_expert() -> None:
    decode = Counters(
        steps=10, tokens=20, lookups=80, hits=50, misses=30, demand_uploads=20, streamed=10,
        merged_runs=15, bytes_moved=9000,
    )  # fmt: skip
    layers = [
        {"layer": n, "lookups": 20, "hits": 10, "demand_uploads": 5, "streamed": n}
        for n in range(4)
    ]
    row = replace(make_result(), by_phase={"decode": decode}, by_layer=layers)
    assert work_of(row, layout(3, 3)) == Work(10, 20, 80, 9000, (15 + 10) * 3)
    # groups of two and three tensors: their mean over the uploads, 11 and 15 of 26
    assert work_of(row, layout(3, 2)).copies == round(25 * (11 * 3 + 15 * 2) / 26)
    with pytest.raises(UsageError, match="--expert-bytes"):
        work_of(row, ExpertLayout(8, 2, (ExpertGroup((0, 1, 2, 3), ()),)))


def test_a_predicted_row_says_what_it_is() -> None:
    row = make_result()
    costs = calibrated(costs_of(PROFILE), [(WORK, 20.0)])
    found = predicted_row(row, costs, WORK)
    assert (found.kind, found.ms_per_token) == ("predicted", pytest.approx(20.0))
    assert found.counters == row.counters
    assert found.timing["tokens_per_s"] == pytest.approx(50.0)
    assert found.timing["costs"]["bandwidth_gb_s"] == 25.0
    assert "a test device" in found.timing["costs"]["source"]
