"""The report page: self-contained, escaped, and every number in it equal to the rows."""

from __future__ import annotations

import html
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from click.testing import CliRunner
from factories import make_result

from simlab.cli.report import command
from simlab.errors import SimlabError, UsageError
from simlab.report import page as page_module
from simlab.report import text
from simlab.report.page import render_page
from simlab.result.schema import Result
from simlab.result.store import write_results

HOSTILE = "</script><script>alert(1)</script><b>&amp;\"'%{x}"


@pytest.fixture(autouse=True)
def short_library(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse 5 MB of plotly.js only where the test is about it."""
    if request.node.name != "test_the_page_loads_nothing_from_anywhere":
        monkeypatch.setattr(page_module, "_plotly", lambda: "/* plotly.js */")


def grid() -> list[Result]:
    """Five policies, three sizes, two concurrency levels."""
    rows = []
    for level in (1, 4):
        for slots in (96, 192, 384):
            rate = slots / 500 / level**0.5
            rows += [
                make_result("lru", slots, rate, level),
                make_result("mix", slots, rate + 0.1, level, params={"pull": 0.5}),
                make_result("lfu-decay", slots, rate + 0.05, level, declined=0.9),
                make_result("opt", slots, rate + 0.2, level),
                make_result("opt-bypass", slots, rate + 0.22, level, declined=0.2),
            ]
    return [replace(row, needs_engine_change=row.policy == "lfu-decay") for row in rows]


class Page(HTMLParser):
    """The parsed page: start tags, scripts and the cells of the first cells table."""

    def __init__(self, source: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.rows: list[list[tuple[str | None, str]]] = []
        self.text = ""
        self._in: list[str] = []
        self._table = False
        self.feed(source)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.tags.append((tag, found))
        self._in.append(tag)
        if tag == "script":
            self.scripts.append("")
        if tag == "table":
            self._table = (found.get("id") or "").startswith("cells")
        if self._table and tag == "tr":
            self.rows.append([])
        if self._table and "data-v" in found:
            self.rows[-1].append((found["data-v"], ""))

    def handle_endtag(self, tag: str) -> None:
        while self._in and self._in.pop() != tag:
            pass
        if tag == "table":
            self._table = False

    def handle_data(self, data: str) -> None:
        if self._in and self._in[-1] == "script":
            self.scripts[-1] += data
        elif "style" not in self._in:
            self.text += data
            if self._table and self.rows and self.rows[-1] and "thead" not in self._in:
                raw, shown = self.rows[-1][-1]
                self.rows[-1][-1] = (raw, shown + data)

    @property
    def data(self) -> dict[str, Any]:
        """The payload that the script draws from."""
        found: dict[str, Any] = json.loads(self.scripts[0])
        return found

    @property
    def cells(self) -> list[list[tuple[str | None, str]]]:
        """(data-v, text) of each column of each row of the cells tables."""
        return [row for row in self.rows if row]


def figures_of(page: Page) -> list[dict[str, Any]]:
    levels = [level for s in page.data["settings"] for level in s["levels"].values()]
    return [level[name] for level in levels for name in ("frontier", "hits", "bytes")]


def number(raw: str | None) -> float | None:
    return None if raw in ("", None) else float(raw)


def test_the_page_loads_nothing_from_anywhere() -> None:
    source = render_page(grid())
    assert "http://" not in source
    assert "https://" not in source
    page = Page(source)
    for tag, attrs in page.tags:
        assert tag not in {"link", "iframe", "img", "object", "embed", "base"}, tag
        assert not {"src", "srcset", "onclick", "onload"} & set(attrs), (tag, attrs)
        assert (attrs.get("href") or "#").startswith("#")
    style = source[source.index("<style>") : source.index("</style>")]
    assert "url(" not in style
    assert "@import" not in style
    policy = [a["content"] for t, a in page.tags if a.get("http-equiv")]
    assert policy
    assert (policy[0] or "").startswith("default-src 'none'")
    own = page.scripts[0] + page.scripts[2]
    assert not re.search(r"fetch\(|XMLHttpRequest|import\(", own)
    assert len(page.scripts) == 3, "data, plotly once, and the page's own script"
    assert "plotly.js v" in page.scripts[1]


def test_every_number_of_the_table_is_the_row_s() -> None:
    rows = grid()
    page = Page(render_page(rows))
    assert len(page.cells) == len(rows)
    found = {(c[0][0], number(c[1][0]), number(c[2][0])): c for c in page.cells}
    for row in rows:
        cell = found[(row.policy, row.concurrency, sum(row.slots))]
        c = row.counters
        raw = [
            row.concurrency, sum(row.slots), row.slots_share, row.hit_rate, c.misses,
            row.uploads_per_token, row.mib_per_token, c.merged_runs, c.streamed, c.cpu_served,
        ]  # fmt: skip
        shown = [
            str(row.concurrency), text.slots(row.slots), text.percent(row.slots_share),
            text.percent(row.hit_rate), text.count(c.misses), text.amount(row.uploads_per_token),
            text.amount(row.mib_per_token), text.count(c.merged_runs),
            text.count(c.streamed), text.count(c.cpu_served),
        ]  # fmt: skip
        assert [number(value) for value, _ in cell[1:]] == raw
        assert [written for _, written in cell[1:]] == shown


def test_every_point_of_the_charts_is_a_row_s() -> None:
    rows = grid()
    page = Page(render_page(rows))
    (setting,) = page.data["settings"]
    for level in (1, 4):
        here = sorted((r for r in rows if r.concurrency == level), key=lambda r: r.slots)
        charts = setting["levels"][str(level)]
        for chart, x, y in (
            ("frontier", "mib_per_token", "hit_rate"),
            ("hits", "slots_share", "hit_rate"),
            ("bytes", "slots_share", "mib_per_token"),
        ):
            lines = {line["name"]: line for line in charts[chart]["data"]}
            assert set(lines) == {row.policy for row in here}
            for policy, line in lines.items():
                mine = [row for row in here if row.policy == policy]
                assert line["x"] == [getattr(row, x) for row in mine]
                assert line["y"] == [getattr(row, y) for row in mine]


def test_the_script_s_cells_are_in_the_order_of_the_table() -> None:
    rows = grid()
    page = Page(render_page(rows))
    cells = page.data["settings"][0]["cells"]
    order = [(c[0][0], number(c[1][0]), str(int(number(c[2][0]) or 0))) for c in page.cells]
    assert [(cell["label"], cell["level"], cell["size"]) for cell in cells] == order
    row = next(r for r in rows if r.policy == "mix" and r.concurrency == 1 and r.slots == (192,))
    cell = cells[order.index(("mix", 1, "192"))]
    assert cell["layers"] == [
        [part["layer"], round(part["hits"] / part["lookups"], 4)] for part in row.by_layer
    ]
    parts = {name: values for name, *values in cell["parts"]}
    assert parts["steps of up to 8 tokens"][4] == text.count(row.counters.misses)


def test_figures_are_valid_plotly_and_styled_the_same_everywhere() -> None:
    page = Page(render_page(grid()))
    looks: dict[str, set[tuple[str, str, str]]] = {}
    for figure in figures_of(page):
        painted = json.loads(re.sub(r'"var\(--[\w-]+\)"', '"#123456"', json.dumps(figure)))
        go.Figure(painted)
        for line in figure["data"]:
            look = (line["line"]["color"], line["marker"]["symbol"], line["line"]["dash"])
            looks.setdefault(line["name"], set()).add(look)
    assert all(len(found) == 1 for found in looks.values()), looks
    dashes = {name: next(iter(found))[2] for name, found in looks.items()}
    assert dashes == {
        "lru": "solid", "mix": "solid", "lfu-decay": "solid", "opt": "dash", "opt-bypass": "dot",
    }  # fmt: skip


def test_cliff_and_cycle_are_marked() -> None:
    charts = Page(render_page(grid())).data["settings"][0]["levels"]
    one, four = charts["1"]["hits"]["layout"], charts["4"]["hits"]["layout"]
    assert one["annotations"][0]["text"] == "┆ cliff 92 · cycle T 96"
    assert one["shapes"][0]["x0"] == pytest.approx(92 / 768)
    assert four["annotations"][0]["text"] == "┆ cliff 280 · cycle T 160–368, median 280"
    assert four["shapes"][1]["x0"] == pytest.approx(160 / 768)
    assert four["shapes"][1]["x1"] == pytest.approx(368 / 768)
    flat = [replace(row, cliff_slots=0, cliff_share=0.0) for row in grid()]
    assert (
        "shapes" not in Page(render_page(flat)).data["settings"][0]["levels"]["1"]["hits"]["layout"]
    )


def test_hostile_names_stay_text() -> None:
    rows = [
        replace(
            row,
            policy=HOSTILE if row.policy == "mix" else row.policy,
            trace_name=HOSTILE,
            model=HOSTILE,
            semantics=HOSTILE,
            policy_hash=HOSTILE,
            trace_hash=HOSTILE,
            params={HOSTILE: 1.0},
            notes=(HOSTILE,),
            provenance={HOSTILE: HOSTILE, "nested": {HOSTILE: [HOSTILE]}},
        )
        for row in grid()
    ]
    source = render_page(rows, title=HOSTILE)
    page = Page(source)
    assert len(page.scripts) == 3
    assert "alert" not in page.scripts[1] + page.scripts[2]
    assert "<b>&amp;" not in source.replace(html.escape(HOSTILE), "")
    assert HOSTILE in page.text
    for figure in figures_of(page):
        for line in figure["data"]:
            for shown in (line["name"], *line["text"]):
                assert not re.search(r"<(?!/?b>|br>)", shown), "plotly reads markup in texts"
    assert page.data["settings"][0]["cells"][1]["label"] == HOSTILE


def test_lone_surrogates_do_not_stop_a_report(tmp_path: Path) -> None:
    write_results([make_result(trace_name="a\ud800b")], tmp_path / "r.json")
    run(tmp_path / "r.json", "--out", tmp_path / "x.html")
    assert "a?b" in (tmp_path / "x.html").read_text(encoding="utf-8")


def test_what_decides_the_figures_stands_beside_each() -> None:
    page = render_page(grid())
    assert page.count("llama.cpp semantics · shared pool · on decline: cpu") >= 5
    assert page.count("SIMULATED, real trace") == 4
    assert "SYNTHETIC" not in page


def test_synthetic_traces_are_named_loudly() -> None:
    rows = [replace(row, synthetic=True) for row in grid()]
    page = render_page(rows)
    assert "<b>SYNTHETIC TRACE</b> The picks were generated" in page
    assert page.count("SIMULATED, synthetic trace") == 4
    mixed = render_page([*rows, make_result(trace_hash="real")])
    assert "<b>SYNTHETIC TRACE</b> Some of the picks were" in mixed


def test_captions_say_what_a_declined_miss_costs() -> None:
    assert "at the price of work for the CPU" in render_page(grid())
    streamed = [replace(row, on_decline="stream") for row in grid()]
    assert "also a declined one" in render_page(streamed)


def test_busy_lanes_are_stated() -> None:
    levels = Page(render_page(grid())).data["settings"][0]["levels"]
    assert [level["at"] for level in levels.values()] == [
        "concurrency 1", "concurrency 4 (mean 4.0 streams busy)",
    ]  # fmt: skip


def test_no_claim_of_speed() -> None:
    words = Page(render_page(grid())).text
    assert not re.search(r"\bms\b|tok/s|tokens per second|speed|faster", words)


def test_several_traces_and_semantics_have_their_own_sections() -> None:
    rows = grid()
    rows += [replace(row, trace_hash="b", trace_name="second") for row in grid()[:5]]
    rows += [replace(row, semantics="per-pick") for row in grid()]
    page = Page(render_page(rows))
    sections = [a["id"] for t, a in page.tags if t == "section" and "id" in a]
    assert sections == ["s0", "s1", "s2"]
    assert [a.get("href") for t, a in page.tags if t == "a"] == ["#s0", "#s1", "#s2"]
    assert [len(s["cells"]) for s in page.data["settings"]] == [30, 5, 30]
    assert "inflates hit rates" in page.text


def test_kinds_are_drawn_apart() -> None:
    rows = grid()
    rows += [replace(row, kind="measured") for row in grid() if row.policy == "lru"]
    rows += [replace(row, kind="predicted") for row in grid() if row.policy == "lru"]
    page = Page(render_page(rows))
    lines = page.data["settings"][0]["levels"]["1"]["hits"]["data"]
    looks = {(line["marker"]["symbol"], line["mode"]) for line in lines if line["name"] == "lru"}
    assert looks == {
        ("circle", "lines+markers"), ("circle-open", "markers"),
        ("circle-open-dot", "lines+markers"),
    }  # fmt: skip
    for word in ("SIMULATED", "PREDICTED", "MEASURED"):
        assert word in page.text
    assert "within 0.00 points of the simulated one" in page.text
    assert {cell["label"] for cell in page.data["settings"][0]["cells"]} >= {"lru (measured)"}


def test_unknown_bytes_and_missing_parts() -> None:
    rows = [
        replace(
            row,
            mib_per_token=None,
            counters=replace(row.counters, bytes_moved=None),
            by_layer=[],
            by_class={},
            by_phase={},
            provenance={},
        )
        for row in grid()
    ]
    rows.append(replace(rows[0], hit_rate=None, uploads_per_token=None, slots=(2,)))
    page = Page(render_page(rows))
    charts = page.data["settings"][0]["levels"]["1"]
    assert charts["frontier"] is None
    assert charts["bytes"] is None
    assert charts["hits"] is not None
    assert "how large an expert is" in page.data["settings"][0]["empty"]
    assert ("", "–") in page.cells[0], "an unknown number is a dash"
    assert not any(a.get("data-chart") == "heat" for _, a in page.tags)


def test_only_bounds_and_one_cell() -> None:
    assert "only bounds" in Page(render_page([make_result("opt")])).text
    assert "compares nothing" in Page(render_page([make_result()])).text


def test_groups_of_slots() -> None:
    equal = [replace(row, slots=(row.slots[0] // 2,) * 2) for row in grid()]
    layout = Page(render_page(equal)).data["settings"][0]["levels"]["1"]["hits"]["layout"]
    assert layout["meta"] == {"full": 384.0}
    assert layout["xaxis"]["title"]["text"].startswith("slots per group")
    uneven = [replace(row, slots=(row.slots[0] - 10, 10)) for row in grid()]
    page = Page(render_page(uneven))
    layout = page.data["settings"][0]["levels"]["1"]["hits"]["layout"]
    assert layout["meta"] == {"full": 768.0}
    assert layout["xaxis"]["title"]["text"].startswith("slots of all groups")
    assert page.cells[0][2] == ("96", "86 + 10")


def test_hundreds_of_cells() -> None:
    rows = [
        make_result(f"p{p}", 40 + 40 * s, 0.3 + p / 100 + s / 50, level)
        for p in range(15)
        for s in range(14)
        for level in (1, 4, 16)
    ]
    page = Page(render_page(rows))
    assert len(page.cells) == len(rows) == 630


def test_provenance_lists_what_made_the_figures() -> None:
    rows = [
        replace(row, provenance={**row.provenance, "seconds": float(i)})
        for i, row in enumerate(grid())
    ]
    words = Page(render_page(rows)).text
    for expected in (
        "8d1f0c3e55aa9b10", "51c2a7be90d3f644", "gpt-oss-20b", "a1b2c3d4e5f60718", "lfu-decay@1",
        "pull = 0.5", "declines misses: needs an engine change", "a bound: knows the future",
        "simlab replay gptoss20b_decode_a --policy lru", "0.68.0", "Linux x86_64, 2 CPUs",
        "2026-11-30T04:00:00Z", "… 28 more …", "29.0", "24 layers",
    ):  # fmt: skip
        assert expected in words, expected


def test_accessible_basics() -> None:
    page = Page(render_page(grid()))
    tags = page.tags
    assert ("html", {"lang": "en"}) in tags
    assert all(a.get("aria-label") for t, a in tags if a.get("role") in ("img", "group"))
    assert all(a.get("scope") for t, a in tags if t == "th")
    assert sum(t == "h1" for t, _ in tags) == 1
    assert sum(t == "figcaption" for t, _ in tags) == sum(t == "figure" for t, _ in tags) == 4


def run(*args: object) -> str:
    result = CliRunner().invoke(command, [str(a) for a in args], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def test_command_reads_both_formats_and_prints_the_page(tmp_path: Path) -> None:
    rows = grid()
    write_results(rows[:15], tmp_path / "a.json")
    write_results(rows[15:], tmp_path / "b.parquet")
    out = tmp_path / "x.html"
    said = run(tmp_path / "a.json", tmp_path / "b.parquet", "--out", out, "--title", "A <title>")
    assert said == f"{out}\n"
    source = out.read_text(encoding="utf-8")
    assert len(Page(source).cells) == len(rows)
    assert "<h1>A &lt;title&gt;</h1>" in source


@pytest.mark.parametrize(
    ("args", "error", "words"),
    [
        (["r.json", "--out", "x.pdf"], UsageError, "is an HTML page"),
        (["r.json", "--out", "nowhere/x.html"], UsageError, "create it"),
        (["gone.json", "--out", "x.html"], UsageError, "no result file"),
        (["r.txt", "--out", "x.html"], UsageError, r"\.json or \.parquet"),
        (["empty.json", "--out", "x.html"], UsageError, "no rows"),
        (["bad.json", "--out", "x.html"], SimlabError, "cannot read results"),
    ],
)
def test_command_errors(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    error: type[SimlabError],
    words: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    write_results([make_result()], "r.json")
    write_results([], "empty.json")
    Path("bad.json").write_text("[{")
    before = sorted(tmp_path.iterdir())
    with pytest.raises(error, match=words) as caught:
        command.main(args, standalone_mode=False)
    assert type(caught.value) is error
    assert sorted(tmp_path.iterdir()) == before
