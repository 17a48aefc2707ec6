"""Times in a report: measured points on predicted curves, and never one taken for the other."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from typing import Any

import plotly.graph_objects as go
import pytest
from factories import make_result

from simlab.report import page as page_module
from simlab.report.page import render_page
from simlab.result.schema import Result

NOTE = "host memory copy, not PCIe"


@pytest.fixture(autouse=True)
def short_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_module, "_plotly", lambda: "/* plotly.js */")


def cell(policy: str, slots: int, ms: float, predicted: float, **timing: Any) -> list[Result]:
    """Simulated, predicted and measured rows of one cell."""
    row = make_result(policy, slots, slots / 500)
    measured = {
        "ms_per_token_low": ms * 0.9,
        "ms_per_token_high": ms * 1.2,
        "tokens_per_s": 1e3 / ms,
        "upload_gb_s": 11.5,
        "upload_efficiency": 0.92,
        "plan_us_per_layer": 3.1,
        "device": "a test device",
        "device_note": NOTE,
        "predicted_ms_per_token": predicted,
        "error": predicted / ms - 1,
        "equal_to_simulation": True,
        "calibrated_on_this": False,
        "baselines_ms_per_token": {"resident": 0.5, "stream-all": 70.0},
        **timing,
    }
    return [
        row,
        replace(row, kind="predicted", ms_per_token=predicted),
        replace(row, kind="measured", ms_per_token=ms, timing=measured),
    ]


def rows() -> list[Result]:
    return [
        *cell("lru", 96, 9.0, 9.0, calibrated_on_this=True),
        *cell("lru", 192, 4.0, 4.4),
        *cell("mix", 96, 6.0, 5.7),
        *cell("mix", 192, 3.0, 3.0),
    ]


def figures(page: str) -> dict[str, Any]:
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.S)
    assert data is not None
    return json.loads(data.group(1))["settings"][0]["levels"]["1"]


def test_measured_points_lie_beside_predicted_curves() -> None:
    found = figures(render_page(rows()))
    drawn = {(line["name"], line["marker"]["symbol"]): line for line in found["time"]["data"]}
    predicted, measured = drawn["lru", "circle-open-dot"], drawn["lru", "circle-open"]
    assert (predicted["mode"], predicted["y"]) == ("lines+markers", [9.0, 4.4])
    assert (measured["mode"], measured["y"]) == ("markers", [9.0, 4.0])
    assert measured["error_y"]["array"] == pytest.approx([1.8, 0.8])
    assert measured["error_y"]["arrayminus"] == pytest.approx([0.9, 0.4])
    assert "error_y" not in predicted
    assert all("(predicted)" in text for text in predicted["text"])
    assert all("(measured)" in text for text in measured["text"])
    for name in ("time", "residuals"):
        for trace in found[name]["data"]:
            go.Scatter(
                **{**trace, "marker": {}, "line": {}, "error_y": {}}
            )  # plotly knows the rest


def test_predicted_rows_are_drawn_with_the_times_only() -> None:
    found = figures(render_page(rows()))
    for name in ("hits", "bytes", "frontier"):
        symbols = {line["marker"]["symbol"] for line in found[name]["data"]}
        assert not [symbol for symbol in symbols if "dot" in symbol]
        assert {"circle", "circle-open"} <= symbols


def test_residuals_leave_out_what_was_calibrated_on() -> None:
    found = figures(render_page(rows()))["residuals"]["data"]
    errors = {line["name"]: line["y"] for line in found}
    assert errors["lru"] == [pytest.approx(0.1)]
    assert errors["mix"] == [pytest.approx(-0.05), 0.0]


def test_the_page_says_where_it_was_measured_and_how_well_it_was_predicted() -> None:
    page = html.unescape(render_page(rows()))
    assert f"What is marked measured ran on a test device ({NOTE})." in page
    assert "In all 4 measured cells hits, misses and bytes are exactly those simulated." in page
    assert "off by 5.0\u202f% in the median of 3 cells, by 10.0\u202f% at most" in page
    assert "the fastest measured is mix: 3.00 ms per token, 25\u202f% less than LRU" in page
    assert "resident 0.50, stream-all 70.0" in page
    table = page[page.index("Measured beside predicted") : page.index("All 12 cells")]
    assert table.count('class="tag measured"') == 4
    assert table.count("calibration") == 1
    for kind in ("simulated", "predicted", "measured"):
        assert page.count(f'<td data-v="{kind}">{kind}</td>') == 4


def test_a_cell_that_differs_is_not_called_equal() -> None:
    changed = rows()
    timing = {**changed[-1].timing, "equal_to_simulation": False}
    changed[-1] = replace(changed[-1], timing=timing)
    page = render_page(changed)
    assert "In 3 of 4 measured cells" in page
    assert "DIFFERENT" in page


def test_without_times_there_is_no_chart_of_them() -> None:
    page = render_page([make_result("lru"), make_result("mix")])
    assert 'data-chart="time"' not in page
    assert "Measured beside predicted" not in page
    assert "ms / token" not in page


def test_timing_of_other_programs_is_not_trusted() -> None:
    strange = {"error": "<b>", "ms_per_token_low": None, "device": "<i>", "upload_gb_s": True}
    row = make_result("lru")
    page = render_page([row, replace(row, kind="measured", ms_per_token=2.0, timing=strange)])
    assert "&lt;i&gt;" in page
    assert "<i>" not in page
