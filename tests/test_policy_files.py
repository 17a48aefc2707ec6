"""Policy files as people write them: wrong ones are refused in one line, right ones just run."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest

from simlab.errors import PolicyError, UsageError
from simlab.policy.registry import load_policy, policy_names
from simlab.policy.sources import own_sources
from simlab.replay.run import replay_cell
from simlab.trace.schema import DECODE, Trace, TraceMeta

GOOD = '''"""First key in, first key out, written the short way."""
from typing import NamedTuple
import numpy as np

NAME = "mine"
VERSION = 1
SOURCE = "a test"


class State(NamedTuple):
    queue: np.ndarray
    ends: np.ndarray


def init(geometry, slots, params):
    return State(np.zeros(4 * geometry.keys * 1000, np.int64), np.zeros(2, np.int64))


def victim(state, cache, group, key):
    place = state.ends[0]
    while cache.stamp[state.queue[place]] == cache.now[0]:
        place += 1
    chosen = state.queue[place]
    while place > state.ends[0]:
        state.queue[place] = state.queue[place - 1]
        place -= 1
    state.ends[0] += 1
    return chosen


def on_insert(state, cache, group, key):
    state.queue[state.ends[1]] = key
    state.ends[1] += 1
'''


def small_trace(tokens: int = 60) -> Trace:
    """Two layers, eight experts, two picks a token."""
    rng = np.random.default_rng(3)
    rows = 2 * tokens
    picks = np.stack([rng.permutation(8)[:2] for _ in range(rows)]).astype(np.uint16)
    return Trace(
        TraceMeta(n_expert=8, k=2, moe_layers=(3, 4), content_hash="t"),
        np.zeros(rows, np.int32),
        np.repeat(np.arange(tokens, dtype=np.int32), 2),
        np.full(rows, DECODE, np.uint8),
        np.tile(np.array([3, 4], np.int16), tokens),
        np.arange(rows + 1, dtype=np.int64) * 2,
        picks.reshape(-1),
    )


def write(folder: Path, text: str, name: str = "mine.py") -> str:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return str(path)


def test_own_file_runs_and_equals_the_built_in_twin(tmp_path: Path) -> None:
    mine = replay_cell(small_trace(), policy=write(tmp_path, GOOD), slots=6)
    fifo = replay_cell(small_trace(), policy="fifo", slots=6)
    assert mine.counters == fifo.counters
    assert 0 < mine.counters.hits < mine.counters.lookups


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("def init(:\n", r"mine\.py, line 1: invalid syntax"),
        ("\0", r"mine\.py: source code string cannot contain null bytes"),
        (
            GOOD.replace(
                "return State(np.zeros(4 * geometry.keys * 1000, np.int64), ", "return dict(q="
            ),
            r"NamedTuple of arrays, not dict",
        ),
        (GOOD.replace("def victim", "victim = max\ndef other"), r"lacks the function victim"),
        (GOOD + "\non_hit = max\n", r"on_hit must be a function of the file"),
        (GOOD.replace("def victim", "def other"), r"lacks the function victim\(state, cache"),
        (GOOD.replace("def init", "def begin"), r"lacks the function init\(geometry, slots"),
        (GOOD.replace("NAME =", "NOTNAME ="), r"lacks NAME"),
        (
            GOOD.replace("cache, group, key):\n    place", "cache):\n    place"),
            r"victim\(\) takes 2",
        ),
        (GOOD + "\nimport nowhere_to_be_found\n", r"No module named 'nowhere_to_be_found'"),
        (GOOD + "\n1 / 0\n", r"line \d+: ZeroDivisionError"),
        (
            GOOD.replace("return chosen", "return 0"),
            r"named a victim that (is not resident|belongs)",
        ),
        (GOOD.replace("return chosen", "return -7"), r"key -7, which does not exist"),
        (GOOD.replace("return chosen", "return key"), r"is not resident \(layer [34], expert \d\)"),
        (GOOD.replace("return chosen", "return 'x'"), r"victim\(\) gives a key"),
        (GOOD.replace("return chosen", "return [chosen][0]"), r"line 28\): it allocates memory"),
        (GOOD.replace("return chosen", "return chosen.nothing"), r"line 28\): Unknown attribute"),
        (GOOD.replace("return chosen", "return chosen * 1.0"), r"victim\(\) gives a key"),
        (GOOD.replace("return chosen", "return np.zeros(3)[0] + chosen"), r"allocate in init"),
        (GOOD.replace("return chosen", "return chosen // state.ends[0] * 0"), r"victim"),
        (GOOD.replace("return chosen", "return chosen % (group.k - 2)"), r"ZeroDivisionError"),
        (
            GOOD.replace("np.zeros(2, np.int64)", "np.zeros(1 / 0)"),
            r"init\(\) failed: ZeroDivision",
        ),
        (GOOD + "\nNEEDS = ('luck',)\n", r"NEEDS 'luck'"),
        (GOOD + "\nNEEDS = 3\n", r"NEEDS must be"),
        (GOOD + "\nNAME = 'mine\\nyours'\n", r"NAME must be"),
        (GOOD + "\nVERSION = 10 ** 30\n", r"VERSION must be"),
        (GOOD + "\nraise SystemExit(0)\n", r"SystemExit"),
        (GOOD.replace("return State(", "raise SystemExit; State("), r"init\(\) failed: SystemExit"),
        (GOOD + "\nPARAMS = {'a': 3}\n", r"PARAMS must be"),
        (GOOD + "\ndef admit(state, cache, group, key, victim):\n    return True\n", "DECLINES"),
    ],
)
def test_a_bad_file_is_one_clear_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(PolicyError, match=message) as caught:
        replay_cell(small_trace(), policy=write(tmp_path, text), slots=6)
    assert "\n" not in str(caught.value)
    assert "mine" in str(caught.value)


def test_a_present_member_is_never_a_victim(tmp_path: Path) -> None:
    text = GOOD.replace("while cache.stamp[state.queue[place]] == cache.now[0]:", "while False:")
    text = text.replace("return chosen", "return cache.key_of[group.slots - 1]")
    with pytest.raises(PolicyError, match=r"belongs to the present set \(layer [34], expert \d\)"):
        replay_cell(small_trace(), policy=write(tmp_path, text), slots=4)


def test_the_nearest_name_is_offered() -> None:
    with pytest.raises(UsageError, match="did you mean lru"):
        load_policy("lru2")
    with pytest.raises(UsageError, match="no policy file"):
        load_policy("./not_there.py")


def test_parameters_are_checked() -> None:
    policy = load_policy("lfu-decay")
    assert policy.values({"half_life": 16}) == {"half_life": 16.0}
    with pytest.raises(UsageError, match="did you mean half_life"):
        policy.values({"halflife": 3})
    with pytest.raises(UsageError, match=r"must be 0\.01\.\."):
        policy.values({"half_life": -1})
    with pytest.raises(UsageError, match="must be a number"):
        policy.values({"half_life": "x"})  # type: ignore[dict-item]
    with pytest.raises(UsageError, match="it has: none"):
        load_policy("lru").values({"half_life": 1})


def test_every_built_in_declares_what_the_docs_print() -> None:
    core = "lru lfu lfu-decay arc fifo random opt opt-bypass stale mix"
    assert set(core.split()) <= set(policy_names())
    for name in policy_names():
        policy = load_policy(name)
        assert policy.name == name
        assert len(policy.doc) > 60, name
        assert re.search(r"\d{4}|simlab", policy.source), name


def test_editing_a_helper_changes_the_next_result(tmp_path: Path) -> None:
    """numba's own cache would serve stale code here: the helper lies in another file."""
    text = GOOD.replace("import numpy as np", "import numpy as np\nfrom pick_helper import choose")
    text = text.replace("return chosen", "return choose(chosen)")
    helper = tmp_path / "pick_helper.py"
    helper.write_text("def choose(key):\n    return key\n")
    first = load_policy(write(tmp_path, text))
    assert helper in own_sources(Path(first.path))
    kept = replay_cell(small_trace(), policy=str(first.path), slots=6)
    helper.write_text("def choose(key):\n    return -5\n")
    second = load_policy(str(first.path))
    assert second.hash != first.hash
    with pytest.raises(PolicyError, match="key -5"):
        replay_cell(small_trace(), policy=str(first.path), slots=6)
    helper.write_text("def choose(key):\n    return key\n")
    again = replay_cell(small_trace(), policy=str(first.path), slots=6)
    assert again.counters == kept.counters


def test_two_policies_with_helpers_of_one_name(tmp_path: Path) -> None:
    text = GOOD.replace("import numpy as np", "import numpy as np\nfrom pick_helper import choose")
    text = text.replace("return chosen", "return choose(chosen)")
    for name, body in (("a", "return key"), ("b", "return -5")):
        folder = tmp_path / name
        folder.mkdir()
        (folder / "pick_helper.py").write_text(f"def choose(key):\n    {body}\n")
        write(folder, text)
    assert replay_cell(small_trace(), policy=str(tmp_path / "a" / "mine.py"), slots=6).counters.hits
    with pytest.raises(PolicyError, match="key -5"):
        replay_cell(small_trace(), policy=str(tmp_path / "b" / "mine.py"), slots=6)
