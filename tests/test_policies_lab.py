"""`simlab policies new` and `check`, policies of other packages, and names that meet."""

from __future__ import annotations

import json
import re
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from test_policy_files import GOOD, write

from simlab.cli import main
from simlab.errors import PolicyError, UsageError
from simlab.policy import registry
from simlab.policy.registry import load_policies, load_policy, outside_policies, policy_names
from simlab.result.store import read_results


def test_from_new_to_a_curve_in_the_report(
    tmp_path: Path, repo: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The commands of docs/policies.md, as they are printed there."""
    page = (repo / "docs" / "policies.md").read_text(encoding="utf-8")
    start = page.index("    simlab policies new mine")
    commands = [line.split() for line in page[start:].split("\n\n")[0].splitlines()]
    assert [words[1] for words in commands] == ["policies", "policies", "curve", "report"]
    monkeypatch.chdir(tmp_path)
    for words in commands:
        assert main(words[1:]) == 0, words
    out = capsys.readouterr().out
    assert "ok  compiles; invariants hold, with bounds checks" in out
    assert "ok  interpreted = compiled" in out
    assert re.search(r"mine@1: \d+\.\d M lookups/s, \d+\.\d\d x LRU", out)
    rows = read_results("mine.parquet")
    hits: dict[str, dict[tuple[int, ...], int]] = {}
    for row in rows:
        hits.setdefault(row.policy, {})[row.slots] = row.counters.hits
    assert set(hits) == {"lru", "mine", "opt"}
    assert len(hits["mine"]) >= 50
    assert all(0 <= found <= hits["opt"][slots] for slots, found in hits["mine"].items())
    assert 0 < sum(hits["mine"].values()) < sum(hits["opt"].values())
    assert "mine" in Path("mine.html").read_text(encoding="utf-8")
    assert main(["policies", "new", "mine"]) == 2
    assert "mine.py exists" in capsys.readouterr().err
    for name in ("../mine", "a b", ""):
        assert main(["policies", "new", name]) == 2
        assert "a policy's name is letters" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("return chosen", "return chosen * 1.0"), r"victim\(\) gives a key"),
        (
            ("state.queue[state.ends[1]] = key", "state.queue[state.ends[1] + 10**6] = key"),
            r"IndexError: index is out of bounds",
        ),
        (("return chosen", "while chosen >= 0: pass\n    return chosen"), r"within 30 s \(bounds"),
        (
            ("return State(", "fill = [np.ones(2**20) for _ in range(10**6)]; return State("),
            r"init\(\) failed: MemoryError",
        ),
        (("return chosen", "return cache.key_of[0]"), r"a victim that belongs to the present"),
    ],
)
def test_what_is_wrong_is_one_line(
    tmp_path: Path, change: tuple[str, str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert change[0] in GOOD
    path = write(tmp_path, GOOD.replace(*change))
    limit = "30" if "while chosen" in change[1] else "300"
    code = main(["policies", "check", path, "--seconds", limit, "--memory", "1024"])
    err = capsys.readouterr().err
    assert code == 1
    assert err.startswith("simlab: error: ")
    assert err.count("\n") == 1
    assert re.search(message, err), err


def test_a_policy_that_remembers_between_runs(
    tmp_path: Path, repo: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (repo / "policies" / "fifo.py").read_text(encoding="utf-8")
    text = text.replace("class State", "import numpy as np\n\nRUNS = np.zeros(1)\n\n\nclass State")
    text = text.replace("    arrival: Lists\n", "    arrival: Lists\n    run: float\n")
    text = text.replace("    return State(", "    RUNS[0] += 1\n    return State(run=RUNS[0], ")
    text += (
        "\n\nDECLINES = True\n\n\ndef admit(state, cache, group, key, victim):\n"
        "    return victim < 0 or (state.run + key) % 3 > 0\n"
    )
    assert main(["policies", "check", write(tmp_path, text)]) == 1
    assert "decides otherwise the second time" in capsys.readouterr().err


def test_what_a_policy_prints_is_not_a_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = GOOD.replace("    return chosen", '    print("chose", chosen)\n    return chosen')
    path = write(tmp_path, text)
    for words in (
        f"replay tiny-demo-model --policy {path}",
        f"compare lru {path} tiny-demo-model --resamples 100",
    ):
        assert main([*words.split(), "--slots", "300", "--json"]) == 0
        told = capsys.readouterr()
        assert json.loads(told.out)
        assert re.search(r"^chose \d+$", told.err, re.MULTILINE)


def test_check_has_limits_and_needs_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["nowhere.py"], ["lru", "--seconds", "0"], ["lru", "--memory", "-1"]):
        assert main(["policies", "check", *words]) == 2
        assert capsys.readouterr().err.count("\n") == 1


def test_two_files_with_one_name(tmp_path: Path) -> None:
    one, two = write(tmp_path, GOOD, "one.py"), write(tmp_path, GOOD, "two.py")
    assert [p.name for p in load_policies(["lru", one, one])] == ["lru", "mine"]
    with pytest.raises(UsageError, match=r"one\.py and .*two\.py both name their policy 'mine'"):
        load_policies([one, two])
    lru = write(tmp_path, GOOD.replace('"mine"', '"lru"'), "three.py")
    with pytest.raises(UsageError, match=r"lru\.py and .*three\.py both name"):
        load_policies(["lru", lru])


def offer(monkeypatch: pytest.MonkeyPatch, *offers: tuple[str, str]) -> None:
    """Pretend that installed packages offer policies."""
    entries = [EntryPoint(name, module, registry.ENTRY_POINTS) for name, module in offers]
    monkeypatch.setattr(registry, "entry_points", lambda group: entries)


def test_a_package_offers_a_policy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    package = tmp_path / "a_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    write(package, GOOD)
    write(package, GOOD, "other.py")
    monkeypatch.syspath_prepend(tmp_path)
    offer(monkeypatch, ("mine", "a_package.mine"), ("other", "a_package.other"), ("x", "no.such"))
    assert load_policy("mine").path == package / "mine.py"
    assert "mine" not in policy_names()
    with pytest.raises(PolicyError, match="names itself 'mine', its package says 'other'"):
        load_policy("other")
    with pytest.raises(PolicyError, match=r"policy x: no\.such: ModuleNotFoundError"):
        load_policy("x")
    with pytest.raises(UsageError, match="did you mean mine"):
        load_policy("mines")
    offer(monkeypatch, ("mine", "a_package.mine"))
    assert main(["policies", "list"]) == 0
    assert "mine@1" in capsys.readouterr().out


def test_a_package_may_not_take_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    offer(monkeypatch, ("lru", "a.b"))
    with pytest.raises(PolicyError, match="offers a policy 'lru', a name that simlab has"):
        outside_policies()
    offer(monkeypatch, ("new", "a.b"), ("new", "c.d"))
    with pytest.raises(PolicyError, match=r"offers a policy 'new', a name that package a\.b has"):
        outside_policies()


def test_a_trace_without_weights_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["replay", "--policy", "router-ewma", "--slots", "50%"]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "router-ewma needs router weights" in err
