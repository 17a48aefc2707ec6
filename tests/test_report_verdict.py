"""The verdict's sentences for crafted rows, from the plain case to every missing part."""

from __future__ import annotations

from dataclasses import replace

import pytest
from factories import make_result

from simlab.report import text
from simlab.report.cells import assign_series, group_settings, series_key
from simlab.report.tables import best_table
from simlab.report.verdict import Verdict, agreement, best_of, reference_size, verdicts
from simlab.result.schema import Result


def judge(rows: list[Result]) -> Verdict:
    (setting,) = group_settings(rows)
    (found,) = verdicts(setting, assign_series(rows))
    return found


def plain(sentence: str) -> str:
    """A sentence with ordinary spaces and minus signs."""
    return sentence.replace(text.THIN, " ").replace(text.MINUS, "-")


def sentences(found: Verdict, level: int = 1) -> str:
    return plain(" ".join(dict(found.levels)[level]))


def test_a_better_policy_is_named_with_figures_against_lru_and_the_bound() -> None:
    rows = [
        make_result("lru", hit_rate=0.5),
        make_result("mix", hit_rate=0.6),
        make_result("fifo", hit_rate=0.4),
        make_result("opt", hit_rate=0.75),
    ]
    found = judge(rows)
    assert plain(found.lead) == (
        "At 192 slots (25.0 % of the experts) mix moves the fewest MiB per token at concurrency 1"
        " (20 % less than LRU)."
    )
    # 96 lookups a token, 13,219,200 bytes an expert: 38.4 and 48 misses a token
    assert sentences(found) == (
        "mix: 484 MiB per token, hit rate 60.0 %; LRU: 605 MiB per token, hit rate 50.0 %."
        " LRU leaves 25.0 points of hit rate to the opt bound (75.0 %); mix closes 10.0 of them."
    )
    assert found.notes == ()


def test_each_concurrency_has_its_own_winner() -> None:
    rows = [
        make_result("lru", hit_rate=0.5),
        make_result("mix", hit_rate=0.6),
        make_result("stale", hit_rate=0.55),
        make_result("lru", hit_rate=0.2, concurrency=4),
        make_result("mix", hit_rate=0.3, concurrency=4),
        make_result("stale", hit_rate=0.4, concurrency=4),
        make_result("lru", hit_rate=0.3, concurrency=16),
        make_result("mix", hit_rate=0.2, concurrency=16),
        make_result("stale", hit_rate=0.1, concurrency=16),
    ]
    found = judge(rows)
    assert plain(found.lead) == (
        "At 192 slots (25.0 % of the experts) mix moves the fewest MiB per token at concurrency 1"
        " (20 % less than LRU); stale moves the fewest MiB per token at concurrency 4 (25 % less"
        " than LRU); no policy that fills on every miss moves less than LRU at concurrency 16."
    )
    assert "LRU (below its cliff of 280 slots)" in sentences(found, 4)
    assert found.notes == ("No bound was run, so the room left for a better policy is unknown.",)


def test_lru_wins_and_ties_count_for_lru() -> None:
    rows = [make_result("fifo", hit_rate=0.5), make_result("lru", hit_rate=0.5)]
    found = judge(rows)
    assert "no policy that fills on every miss moves less than LRU" in found.lead
    assert sentences(found).startswith("LRU: 605 MiB per token, hit rate 50.0 %.")


def test_lru_at_the_bound_is_said() -> None:
    rows = [make_result("lru", hit_rate=0.9), make_result("opt", hit_rate=0.9)]
    assert sentences(judge(rows)).endswith("LRU is at the opt bound (90.0 %).")


def test_a_single_policy_compares_nothing() -> None:
    found = judge([make_result("lru", hit_rate=0.5), make_result("lru", 384, 0.8)])
    assert plain(found.lead) == (
        "At 192 slots (25.0 % of the experts) LRU hits 50.0 % at concurrency 1; no other policy was"
        " run, so this compares nothing."
    )


def test_without_lru_there_is_no_baseline() -> None:
    found = judge([make_result("mix", hit_rate=0.6), make_result("fifo", hit_rate=0.4)])
    assert "mix moves the least at concurrency 1; lru was not run" in found.lead
    assert "against" not in found.lead


def test_only_bounds() -> None:
    found = judge([make_result("opt", hit_rate=0.8), make_result("opt-bypass", hit_rate=0.9)])
    assert "only bounds, which no engine can run" in found.lead
    assert sentences(found) == "The opt bound: 242 MiB per token, hit rate 80.0 %."


def test_a_policy_that_declines_competes_apart_and_is_named() -> None:
    rows = [
        make_result("lru", hit_rate=0.5),
        make_result("mix", hit_rate=0.6),
        make_result("lfu-decay", hit_rate=0.55, declined=0.95),
        make_result("hermit", hit_rate=0.1, declined=1.0),
    ]
    found = judge(rows)
    assert "lfu-decay" not in found.lead
    assert "hermit" not in found.lead
    assert (
        "With an engine change, lfu-decay: 27.2 MiB per token, hit rate 55.0 % (22.2 times less"
        " than LRU); the CPU computes the misses it declines."
    ) in sentences(found)
    assert "hermit" not in sentences(found), "moving nothing at a tenth of the hits is no win"


def test_declining_below_lru_is_said_to_be_below() -> None:
    rows = [
        make_result("lru", hit_rate=0.5, on_decline="stream"),
        make_result("lfu-decay", hit_rate=0.4, declined=0.9, on_decline="stream"),
    ]
    assert (
        "(20 % more than LRU, at a lower hit rate); the engine copies and drops the misses"
        in sentences(judge(rows))
    )
    assert "every policy declines" in judge(rows[1:]).lead


def test_unknown_bytes_rank_by_uploads() -> None:
    rows = [
        replace(row, mib_per_token=None, counters=replace(row.counters, bytes_moved=None))
        for row in (make_result("lru", hit_rate=0.5), make_result("mix", hit_rate=0.6))
    ]
    found = judge(rows)
    assert "mix moves the fewest uploads per token" in found.lead
    assert "38.4 uploads per token" in sentences(found)
    assert any("bytes of an expert are unknown" in note for note in found.notes)
    assert "MiB per token" not in found.lead + sentences(found)


def test_no_hit_rate_at_all() -> None:
    found = judge([make_result(hit_rate=0.0, slots=2), make_result("mix", 2, 0.0)])
    assert found.levels
    none = [replace(make_result(), hit_rate=None)]
    assert "nothing to compare" in judge(none).lead
    assert judge(none).levels == ()


def test_the_sharpest_policy_is_named_when_it_is_another_one() -> None:
    thrifty = replace(make_result("thrifty", hit_rate=0.55), mib_per_token=100.0)
    rows = [make_result("lru", hit_rate=0.5), thrifty, make_result("sharp", hit_rate=0.7)]
    assert "highest hit rate: sharp, 70.0 %" in sentences(judge(rows))


def test_other_sizes_are_counted() -> None:
    better = {48: -0.1, 96: 0.1, 192: 0.1, 384: 0.0}
    rows = []
    for slots, gain in better.items():
        rows += [make_result("lru", slots, 0.5), make_result("mix", slots, 0.5 + gain)]
    assert plain(judge(rows).notes[0]) == (
        "Of the 3 other pairs of size and concurrency, LRU is beaten by an always-filling policy in"
        " 1 and not beaten in 2."
    )
    assert "too, an always-filling policy moves less" in judge(rows[2:6]).notes[0]
    assert "no always-filling policy moves less" in judge(rows[4:]).notes[0]


def test_the_reference_size_is_the_shared_one_nearest_a_quarter() -> None:
    rows = [make_result("lru", slots) for slots in (48, 200, 576)]
    assert reference_size(rows) == (200,)
    assert reference_size([*rows, make_result("mix", 576)]) == (576,)
    assert reference_size([replace(row, hit_rate=None) for row in rows]) is None


def test_kinds_are_never_mixed_and_their_agreement_is_stated() -> None:
    rows = [
        make_result("lru", hit_rate=0.5),
        make_result("mix", hit_rate=0.6),
        make_result("lru", hit_rate=0.52, kind="measured"),
        make_result("mix", hit_rate=0.51, kind="measured"),
    ]
    (setting,) = group_settings(rows)
    simulated, measured = verdicts(setting, assign_series(rows))
    assert (simulated.kind, measured.kind) == ("simulated", "measured")
    assert "mix moves the fewest" in simulated.lead
    assert "less than LRU" in measured.lead
    assert agreement(setting) == [
        "In 2 measured cells the hit rate is within 9.00 points of the simulated one."
    ]
    assert agreement(group_settings(rows[:2])[0]) == []


def test_semantics_that_flatter_are_named() -> None:
    row = make_result(semantics="per-pick", concurrency=4)
    assert any("inflates hit rates" in note for note in judge([row]).notes)
    assert not any("inflates" in n for n in judge([replace(row, concurrency=1)]).notes)
    assert any("not checked" in n for n in judge([make_result(semantics="sglang")]).notes)


def test_settings_are_separate_and_repeated_rows_count_once() -> None:
    row = make_result()
    others = [
        replace(row, semantics="per-pick"),
        replace(row, on_decline="stream"),
        replace(row, prefill="skip"),
        replace(row, schedule="recorded"),
        replace(row, trace_hash="other"),
        replace(row, layout_hash="other"),
    ]
    settings = group_settings([row, *others, row])
    assert [setting.rows for setting in settings] == [(row,), *((other,) for other in others)]


def test_labels_tell_rivals_of_one_name_apart() -> None:
    rows = [
        make_result("mix", params={"pull": 0.5}),
        make_result("mix", params={"pull": 1.0}),
        make_result("random"),
        make_result("random", seed=2),
        make_result("lru"),
        make_result("mine", policy_hash="aaaaaaaaaa"),
        make_result("mine", policy_hash="bbbbbbbbbb"),
        make_result("opt"),
        make_result("arc", policy_version=1),
        make_result("arc", policy_version=2),
    ]
    names = assign_series(rows)
    assert [names[series_key(row)].label for row in rows] == [
        "mix (pull=0.5)", "mix (pull=1)", "random seed 0", "random seed 2", "lru", "mine #aaaaaa",
        "mine #bbbbbb", "opt", "arc@1", "arc@2",
    ]  # fmt: skip
    assert names[series_key(rows[4])].index == 0, "lru comes first"
    assert names[series_key(rows[7])].index == len(rows) - 1, "bounds come last"
    assert len({(s.color, s.symbol) for s in names.values()}) == len(rows)


def test_best_table_names_a_winner_for_every_size() -> None:
    rows = [make_result(p, s, r) for s, p, r in [(96, "lru", 0.3), (96, "mix", 0.2)]]
    rows += [make_result(p, s, r) for s, p, r in [(192, "lru", 0.5), (192, "mix", 0.6)]]
    (setting,) = group_settings(rows)
    names = assign_series(rows)
    html = plain(best_table(setting, "simulated", names))
    body = html[html.index("<tbody>") :].split("</tr>")
    assert "<b>lru</b> 847" in body[0]
    assert "against LRU" not in body[0]
    assert "<b>mix</b> 484 <small>-20.0 % against LRU</small>" in body[1]
    assert 'class="ref"' in body[1]
    assert best_table(group_settings(rows[:1])[0], "simulated", names) == ""
    assert '<details class="best" open>' in best_table(setting, "simulated", names)


def test_best_table_of_a_curve_is_closed() -> None:
    rows = [make_result(p, 8 * n, 0.5) for n in range(1, 40) for p in ("lru", "mix")]
    (setting,) = group_settings(rows)
    html = best_table(setting, "simulated", assign_series(rows))
    assert html.startswith('<details class="best"><summary>')
    assert html.count('<th scope="row">') == 39


def test_best_of_nothing() -> None:
    best = best_of([])
    assert (best.lru, best.filling, best.declining, best.bound, best.rivals) == (None,) * 4 + (0,)


@pytest.mark.parametrize(
    ("share", "written"),
    [
        (None, "–"), (0.0, "0.0 %"), (1.0, "100.0 %"), (0.597, "59.7 %"), (0.9999, "99.99 %"),
        (0.99999, ">99.99 %"), (0.0004, "0.04 %"), (0.00001, "<0.01 %"), (-0.25, "-25.0 %"),
    ],
)  # fmt: skip
def test_percent(share: float | None, written: str) -> None:
    assert plain(text.percent(share)) == written


@pytest.mark.parametrize(
    ("value", "written"),
    [(None, "–"), (0.0, "0"), (0.5, "0.50"), (38.42, "38.4"), (471.4, "471"), (1234.5, "1 234")],
)
def test_amount(value: float | None, written: str) -> None:
    assert plain(text.amount(value)) == written


@pytest.mark.parametrize(
    ("value", "other", "words"),
    [
        (50, 100, "50 % less than"),
        (3, 100, "33.3 times less than"),
        (0, 100, "100 % less than"),
        (120, 100, "20 % more than"),
        (99.7, 100, "0.3 % less than"),
        (5, 5, "the same as"),
        (5, 0, "more than"),
    ],
)
def test_less_than(value: float, other: float, words: str) -> None:
    assert plain(text.less_than(value, other)) == words


def test_slots_and_counts() -> None:
    assert plain(text.count(10827936)) == "10 827 936"
    assert plain(text.slots((1834, 1834))) == "1 834 × 2"
    assert text.slots((96, 48)) == "96 + 48"
