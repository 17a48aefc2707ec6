"""Every policy on a few accesses, worked out by hand: who hits, who is uploaded, who leaves.

Experts of layer 0 are A, B, C ..., of layer 1 a, b, c ...; a word is a step of one token, `/`
stands between its layers. In what comes out `A` is a hit, `A+` an upload into an empty slot, `A+B`
an upload in place of B, `A-` a declined miss.
"""

from __future__ import annotations

import numpy as np
import pytest

from simlab.policy.protocol import Group, new_cache
from simlab.policy.registry import load_policy, policy_names
from simlab.replay.access import build_access
from simlab.replay.compile import compile_policy
from simlab.replay.kernel import DECLINED, HIT, WHOLE_SET
from simlab.replay.needs import Needs
from simlab.replay.schedule import build_schedule, tokens_of
from simlab.trace.schema import DECODE, Trace, TraceMeta

EXPERTS = 8
LETTERS = ["ABCDEFGH", "abcdefgh"]


def trace_of(text: str, weights: str) -> Trace:
    """A trace of one request whose steps are the words of ``text``."""
    rows = [
        (token, layer, [LETTERS[layer].index(letter) for letter in members])
        for token, word in enumerate(text.split())
        for layer, members in enumerate(word.split("/"))
        if members
    ]
    n_layers = 1 + max(row[1] for row in rows)
    picks = [expert for row in rows for expert in row[2]]
    k = max(len(row[2]) for row in rows)
    return Trace(
        TraceMeta(n_expert=EXPERTS, k=k, moe_layers=tuple(range(n_layers))),
        request=np.zeros(len(rows), np.int32),
        token=np.array([row[0] for row in rows], np.int32),
        phase=np.full(len(rows), DECODE, np.uint8),
        layer=np.array([row[1] for row in rows], np.int16),
        offsets=np.cumsum([0, *(len(row[2]) for row in rows)], dtype=np.int64),
        experts=np.array(picks, np.uint16),
        weights=np.array(weights.split() or [1.0] * len(picks), np.float16),
    )


def play(
    name: str,
    slots: int,
    text: str,
    weights: str = "",
    layer_bytes: tuple[int, ...] = (1, 1),
    **params: float,
) -> str:
    """Replay step by step, telling what became of each lookup."""
    policy, trace = load_policy(name), trace_of(text, weights)
    n_layers = len(trace.meta.moe_layers)
    tokens = tokens_of(trace)
    access = build_access(trace, tokens, build_schedule(trace, tokens), 0)
    keys, n = n_layers * EXPERTS, len(access.experts)
    group = Group(n_layers, EXPERTS, keys, slots, trace.meta.k, n, seed=0)
    in_group = np.arange(n_layers, dtype=np.int32)
    served = np.ones(len(access.set_step), np.bool_)
    needed = Needs(trace).of(policy, access, 1, in_group, group, served)
    cache = new_cache(group, slots, next_use=policy.reads_future, weights=policy.reads_weights)
    sizes = np.array(layer_bytes[:n_layers], np.int64)
    state = policy.new_state(group, params, uses=needed.uses, layer_bytes=sizes)
    outcome, runs = np.zeros(n, np.uint8), np.zeros(len(access.set_step), np.int64)
    replay = compile_policy(policy).replay
    told: list[list[str]] = [[""] * n_layers for _ in text.split()]
    first = 0
    while first < len(access.set_step):
        last = int(np.searchsorted(access.set_step, access.set_step[first], side="right"))
        before = cache.key_of.copy()
        stopped = replay(
            state, cache, group, first, last,
            access.set_step, access.set_layer, access.offsets, access.experts,
            needed.next_use, needed.weights, access.step_tokens,
            in_group, WHOLE_SET, 0, policy.protects_present,
            outcome, runs, np.zeros((8, 3), np.int32), np.zeros(8, np.uint32),
            np.zeros(8, np.uint16), np.zeros(8, np.int32), np.zeros(8, np.uint8),
        )  # fmt: skip
        assert stopped == -1
        for s in range(first, last):
            layer = int(access.set_layer[s])
            events = []
            for i in range(access.offsets[s], access.offsets[s + 1]):
                expert = int(access.experts[i])
                event = LETTERS[layer][expert]
                if outcome[i] == DECLINED:
                    event += "-"
                elif outcome[i] != HIT:
                    gone = int(before[cache.slot_of[layer * EXPERTS + expert]])
                    event += "+" if gone < 0 else "+" + LETTERS[gone // EXPERTS][gone % EXPERTS]
                events.append(event)
            told[access.set_step[s]][layer] = ",".join(events)
        first = last
    return " ".join("/".join(layers).rstrip("/") for layers in told)


EXAMPLES = {
    # A was touched again, so B is the least recent
    "lru": [(2, "A B A C", {}, "A+ B+ A C+B")],
    # the hit on A changes nothing: it came first
    "fifo": [(2, "A B A C", {}, "A+ B+ A C+A")],
    # counts when D comes: A 2, B 1, C 1; B reached its count first. Then C 1 is older than D 1
    "lfu": [(3, "A A B C D E", {}, "A+ A B+ C+ D+B E+C")],
    "lfu-decay": [
        # half-life 1 token, scores when C comes: A 1/8, B 3/4, C 1: in for A
        (2, "A B B C", {"half_life": 1}, "A+ B+ B C+A"),
        # no decay to speak of: A 2, B 2, C 1: declined
        (2, "A A B B C", {"half_life": 1e9}, "A+ A B+ B C-"),
    ],
    # A is in T2. C: p = 0, T1 = {B} is longer, B leaves and becomes a ghost in B1. Its return
    # raises p to 1; T1 = {C} is no longer than that, so the oldest of T2 leaves: A
    "arc": [(2, "A B A C B", {}, "A+ B+ A C+B B+A")],
    # first draw of splitmix64 from 0 is 0xE220A8397B1DCDAF, odd: the second of two residents
    "random": [(2, "A B C", {}, "A+ B+ C+B")],
    # in layer 1 of step 2 both A and a have missed one visit of their layer; layer 0 comes next,
    # layer 1 last: a leaves, where LRU would take A
    "stale": [(3, "A/a B/b", {}, "A+/a+ B+/b+a")],
    # equal counts for A and a; A is worth - 0.5 x 1/2, a - 0.5 x 2/2
    "mix": [
        (3, "A/a B/b", {}, "A+/a+ B+/b+a"),
        # B was picked two visits ago, C one: B leaves (compare mix-tr)
        (2, "A B C A B", {}, "A+ B+ C+A A+B B+C"),
    ],
    # when C comes, A is next used before B; at the last B neither A nor C is used again: the
    # highest key counts as farthest
    "opt": [(2, "A B C A B", {}, "A+ B+ C+B A B+C")],
    # C is never used again: not worth a slot
    "opt-bypass": [(2, "A B C A B", {}, "A+ B+ C- A B")],
    # D: the hand clears A's bit and passes it, B's is clear. B: C is next. E: now A
    "clock": [(3, "A B C A D B E", {}, "A+ B+ C+ A D+B B+C E+A")],
    # D: the hand clears A's mark, takes B and stays before C. E: C goes, though A is older and
    # unmarked. F: D goes, the hand does not turn back to A
    "sieve": [(3, "A B C A D E A F", {}, "A+ B+ C+ A D+B E+C A F+D")],
    # two protected at most. E, C: the oldest on probation leave (C, then D). C's hit protects it
    # and sends A back on probation behind E: E leaves for F, A for G
    "slru": [(4, "A B C D A B E C C F G", {"protected": 0.5}, "A+ B+ C+ D+ A B E+C C+D C F+E G+A")],
    # Kin = 1, Kout = 2. E: A1in is too long, A leaves and is remembered. A returns into Am (B
    # leaves). F: C leaves. D's hit in A1in changes nothing: it leaves for G
    "twoq": [(4, "A B C D E A F D G", {}, "A+ B+ C+ D+ E+A A+B F+C D G+D")],
    # one small slot (A), main B C D. E: A leaves and is a ghost. A returns into main (E leaves,
    # ghost), which is now one too long: B leaves main for F, no ghost. B: F leaves the small queue.
    # C is hit. E was a ghost: into main, B leaves the small queue. G: main is one too long, C has a
    # hit and goes round, D leaves
    "s3fifo": [
        (4, "A B C D E A F B C E G", {"small": 0.25}, "A+ B+ C+ D+ E+A A+E F+B B+F C E+B G+D")
    ],
    # A and B are LIR, C is HIR. D: C leaves Q but stays in S, so at its return (D leaves) it is LIR
    # and A, at the bottom of S, becomes HIR, out of S. A's first hit puts it on S, the second makes
    # it LIR and B, the bottom, HIR: B leaves for E
    "lirs": [(3, "A B C D C A A E", {"hir": 0.34}, "A+ B+ C+ D+C C+D A A E+B")],
    # D: C has no second use. C returns with uses 5 and 7; D has one use only and leaves. E: last
    # uses but one are A 1, B 3, C 5
    "lru-k": [(3, "A A B B C D C E", {}, "A+ A B+ B C+ D+C C+D E+A")],
    # A 3, B 1: B leaves, the age is 1. C enters at 2, is hit: 1 + 2 = 3, as A: lowest expert leaves
    "lfu-da": [(2, "A A A B C C D", {}, "A+ A A B+ C+B C D+A")],
    "lrfu": [
        # half-life 1 token, when C comes: A (1 + 1/2 + 1/4) / 4, B 1/2
        (2, "A A A B C", {"half_life": 1}, "A+ A A B+ C+A"),
        # hardly any fading: A 3, B 1
        (2, "A A A B C", {"half_life": 1000}, "A+ A A B+ C+B"),
    ],
    # about A 2, B 2 all along; C 1, 2, 3 must exceed 2 by e^0.1: only the third try does
    "lrfu-admit": [(2, "A A B B C C C", {"half_life": 1000}, "A+ A B+ B C- C- C+A")],
    # both residents are in a sample of 64. C: A 3 uses in 4 lookups, B 1 in 1. D: B 1 in 2, C 1 in
    # 1
    "hyperbolic": [(2, "A A A B C D", {}, "A+ A A B+ C+A D+B")],
    # first draw 0.883 is not below LRU's weight 0.5: LFU takes B. B returns after 1 lookup: regret
    # 0.005^(1/2) = 0.071 raises LRU's weight to 0.508; the second draw 0.432 is below: LRU takes A
    "lecar": [(2, "A A B C B", {}, "A+ A B+ C+B B+A")],
    # window of 1. A, B, C went through it into the main part. E: D leaves the window with 1 use,
    # no more than A, and goes. A is protected, E used twice. F: E beats B (1 use)
    "w-tinylfu": [
        (4, "A B C D E A E F", {"window": 0.25}, "A+ B+ C+ D+ E+D A E F+B"),
    ],
    # two slots a layer. Layer 0 took four: it gives A, then B. Then layer 1 holds its quota
    "layer-lru": [(4, "A B C D /a /b /c", {}, "A+ B+ C+ D+ /a+A /b+B /c+a")],
    # layer 0 gives its lowest sum: A has 2 uses, B's one use has faded most
    "layer-lrfu": [(4, "A A B C D /a", {"half_life": 1000}, "A+ A B+ C+ D+ /a+B")],
    # b: A and a are both stale, layer 1 comes again last. C: A and B are stale and of the layer
    # that comes again last, A is older. c: b is stale, C was used in this step
    "least-stale": [(3, "A/a B/b C/c", {}, "A+/a+ B+/b+a C+A/c+b")],
    # C: A has 3 uses, more than 2: spared, B leaves. D: A's count is 0 now, and it is the oldest
    "heat-lru": [(2, "A A A B C D", {"uses": 2}, "A+ A A B+ C+B D+A")],
    # one upload a set; LRU's victim for C is A, which was touched before B was uploaded
    "capped-lru": [(2, "AB AB CD", {"uploads": 1}, "A+,B- A,B+ C+A,D-")],
    # after one pick a key's mean is 0.178, one visit later 0.109; A's after two picks 0.123. C
    # gains ln(0.178 / 0.109) = 0.49 over B
    "mix-admit": [
        (2, "A A B C", {"margin": 0.45}, "A+ A B+ C+B"),
        (2, "A A B C", {"margin": 0.55}, "A+ A B+ C-"),
    ],
    # (lift counts 0.7) at the second A: B's mean 0.061 x lift (1 + 8/4) / (9/4) = 1.33, C's 0.077 x
    # lift (8/4) / (9/4) = 0.89: B followed A before, so C leaves and B hits
    "mix-tr": [(2, "A B C A B", {}, "A+ B+ C+A A+C B")],
    # lift counts 1. At the second A its traces add up to 1 + 1/2 + 1/4 (with 8: 9.75); B came when
    # it was 1, C at 1/2. B: ln 0.0412 + ln((1 + 8/4) / (9.75/4)) = -2.98, C: ln 0.0469 +
    # ln((1/2 + 8/4) / (9.75/4)) = -3.03: C leaves. Lift 0.5: B -3.09, C -3.05, so B leaves
    "mix-trace": [
        (2, "A B C A B", {"lift": 1}, "A+ B+ C+A A+C B"),
        (2, "A B C A B", {"lift": 0.5}, "A+ B+ C+A A+B B+C"),
    ],
    # after three tokens A (2 uses) is pinned; the others share the other slot. After three more
    # uses are A 1, C 1, D 1, E 1: A stays pinned, lowest expert first
    "pinned-lru": [(2, "A A B C D E F", {"interval": 3}, "A+ A B+ C+B D+C E+D F+E")],
    # after three tokens only A is pinned: C is declined twice. After three more uses are A 1, B
    # 1.5, C 2: C is pinned and replaces B, the least recent of the others (A has just joined them)
    "repin": [(2, "A A B C B C C", {"interval": 3, "hot": 1}, "A+ A B+ C- B C- C+B")],
    # uses in the run: B 3, C 2, A 1
    "static-hot": [(2, "A B C B C B", {}, "A- B+ C+ B C B")],
}


@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name: str) -> None:
    for slots, text, params, expected in EXAMPLES[name]:
        assert play(name, slots, text, **params) == expected


def test_gdsf_example() -> None:
    """An expert of layer 0 weighs 1, one of layer 1 weighs 3: uses are worth 2 and 2/3.

    A 2, a 2/3: a leaves for B, which enters at 2/3 + 2. b: A 2 is lowest and leaves. c: now 2 is
    the age, b has 2 + 2/3 as B has; of equals the lowest key leaves.
    """
    text = "A/a B /b /c"
    assert play("gdsf", 2, text, layer_bytes=(1, 3)) == "A+/a+ B+a /b+A /c+B"
    assert play("gdsf", 2, text) == play("lfu-da", 2, text)


def test_router_ewma_example() -> None:
    """Half-life one visit. When C comes A has 1/2 x 1/4, B 1/4 x 1/2 x 1/2: B leaves; with equal
    weights the older A does.
    """
    text = "A B C"
    assert play("router-ewma", 2, text, "1 0.25 1", half_life=1) == "A+ B+ C+B"
    assert play("router-ewma", 2, text, "1 1 1", half_life=1) == "A+ B+ C+A"


def test_every_policy_has_an_example() -> None:
    assert {*EXAMPLES, "gdsf", "router-ewma"} == set(policy_names())
