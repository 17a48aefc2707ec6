"""``simlab compare``: verdicts, and its bad input."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from lab_cases import sticky_trace

from simlab.analysis.compare import NO_DIFFERENCE, TOO_FEW, compare
from simlab.cli import main
from simlab.errors import UsageError
from simlab.policy.registry import load_policy
from simlab.replay.cell import Cell
from simlab.replay.run import Replayer
from simlab.result.store import read_results
from simlab.trace.edit import slice_trace
from simlab.trace.write import write_trace


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> str:
    file = tmp_path_factory.mktemp("compare") / "sticky.parquet"
    write_trace(sticky_trace(), file)
    return str(file)


def pair(a: str, b: str, slots: int, concurrency: int = 1) -> tuple[Cell, Cell]:
    return tuple(Cell(load_policy(name), (slots,), None, concurrency) for name in (a, b))  # type: ignore[return-value]


def test_opt_is_better_than_lru_and_says_so_either_way_round() -> None:
    replayer = Replayer(sticky_trace())
    (found,) = compare(replayer, [pair("opt", "lru", 12)])
    (turned,) = compare(replayer, [pair("lru", "opt", 12)])
    assert [d.verdict for d in found.differences] == ["A better", "A better"]
    assert [d.verdict for d in turned.differences] == ["B better", "B better"]
    rate, size = found.differences
    a, b = found.rows
    assert rate.difference.estimate == pytest.approx(a.hit_rate - b.hit_rate)
    assert size.difference.estimate == pytest.approx(a.mib_per_token - b.mib_per_token)
    assert rate.difference.low == pytest.approx(-turned.differences[0].difference.high)


def test_policies_that_do_the_same_do_not_differ() -> None:
    """With a slot for every key all policies miss each key once."""
    (found,) = compare(Replayer(sticky_trace()), [pair("lru", "fifo", 48, 4)])
    for one in found.differences:
        assert (one.difference.low, one.difference.high) == (0, 0)
        assert one.verdict == NO_DIFFERENCE


def test_the_interval_is_of_pairs() -> None:
    """The paired difference is much surer than the two rates by themselves."""
    (found,) = compare(Replayer(sticky_trace()), [pair("mix", "lru", 12)])
    rate = found.differences[0]
    alone = rate.a.high - rate.a.low
    assert rate.difference.high - rate.difference.low < 0.8 * alone


def test_few_requests_get_no_verdict() -> None:
    few = slice_trace(sticky_trace(), requests=range(4))
    (found,) = compare(Replayer(few), [pair("opt", "lru", 12)])
    assert {one.verdict for one in found.differences} == {TOO_FEW}
    assert found.differences[0].difference.low is None


def test_bytes_are_left_out_where_they_are_unknown() -> None:
    trace = sticky_trace()
    trace = replace(trace, meta=trace.meta.with_(expert_bytes=()))
    (found,) = compare(Replayer(trace), [pair("opt", "lru", 12)])
    assert [one.metric.name for one in found.differences] == ["hit_rate"]


def test_no_cached_step() -> None:
    with pytest.raises(UsageError, match="no step passes the gate"):
        compare(Replayer(sticky_trace()), [pair("opt", "lru", 1)])


def test_the_command(path: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "both.parquet"
    line = ["compare", "lru", "mix-tr:lift=0.5", path, "--slots", "12,50%", "--concurrency", "1,4"]
    assert main([*line, "--json", "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["b"] == {"policy": "mix-tr@1", "params": {"lift": 0.5}, "declines": False}
    assert [(c["concurrency"], c["slots"]) for c in told["cells"]] == [
        (1, [12]), (1, [24]), (4, [12]), (4, [24]),
    ]  # fmt: skip
    assert "compare" in told["provenance"]["command"]
    rows = read_results(out)
    assert [row.policy for row in rows] == ["lru", "mix-tr"] * 4
    first = told["cells"][0]["differences"][0]
    assert first["a"]["estimate"] == pytest.approx(rows[0].hit_rate)
    assert first["difference"]["requests"] == 24
    assert main(line) == 0
    text = capsys.readouterr().out
    assert "A - B" in text and "paired bootstrap over 24 requests" in text
    assert first["verdict"] in text and "in equal parts" in text
    # the seed decides the interval
    other = json.loads(_json(capsys, [*line, "--json", "--seed", "1"]))
    again = json.loads(_json(capsys, [*line, "--json"]))
    assert again["cells"] == told["cells"] != other["cells"]


def test_a_policy_file_has_parameters_too(
    path: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    _json(capsys, ["policies", "new", "mine"])
    line = ["compare", "./mine.py:spare=3", "./mine.py", path, "--json"]
    told = json.loads(_json(capsys, line))
    assert [told[x]["params"] for x in "ab"] == [{"spare": 3}, {"spare": 1}]


def _json(capsys: pytest.CaptureFixture[str], line: list[str]) -> str:
    assert main(line) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["lru", "lru"], "the same policy with the same parameters (lru@1)"),
        (["lrfu", "lrfu:half_life=16"], "the same policy with the same parameters"),
        (["lru", "lrfu:half_lief=3"], "did you mean half_life"),
        (["lru", "lrfu:half_life=x"], "takes one number"),
        (["lru", "lrfu:half_life=-3"], "must be 0.01..1e+09"),
        (["lru", "lrfv"], "did you mean lrfu"),
        (["lru", "./nonesuch.py:margin=1"], "no policy file ./nonesuch.py"),
        (["lru", "rows.parquet"], "simlab report FILE..."),
        (["a.json", "b.json"], "A and B are policies, and a.json is none"),
        (["lru", "mix", "--slots", "0"], "at least 1 slot"),
        (["lru", "mix", "--slots", "x"], "--slots takes"),
        (["lru", "mix", "--slots", "9", "--mib", "3"], "not both"),
        (["lru", "mix", "--concurrency", "0"], "1 or more"),
        (["lru", "mix", "--concurrency", "two"], "numbers separated by commas"),
        (["lru", "mix", "--resamples", "3"], "--resamples must be"),
        (["lru", "mix", "--confidence", "2"], "--confidence must be"),
        (["lru", "mix", "--out", "x.txt"], ".json or .parquet"),
        (["lru", "mix", "--semantics", "vllm"], "--semantics must be one of"),
    ],
)
def test_bad_input_is_one_line(
    args: list[str], words: str, path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["compare", *args[:2], path, *args[2:]]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1, err
