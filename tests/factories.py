"""Crafted result rows for the tests of result files and reports; every row conserves lookups."""

from __future__ import annotations

from typing import Any

from simlab.result.schema import Counters, Result

LAYERS = 24
EXPERTS = 32
K = 4
EXPERT_BYTES = 13_219_200


def make_counters(
    lookups: int,
    hits: int,
    declined: int = 0,
    on_decline: str = "cpu",
    steps: int = 1000,
    **changes: Any,
) -> Counters:
    """Counters of ``lookups`` with ``declined`` of the misses filling no slot."""
    uploads = lookups - hits - declined
    streamed = declined if on_decline == "stream" else 0
    values: dict[str, Any] = {
        "steps": steps,
        "tokens": steps,
        "lookups": lookups,
        "hits": hits,
        "misses": lookups - hits,
        "demand_uploads": uploads,
        "streamed": streamed,
        "cpu_served": declined - streamed,
        "merged_runs": uploads * 9 // 10,
        "bytes_moved": (uploads + streamed) * EXPERT_BYTES,
        "picks": lookups,
        "pick_hits": hits,
    }
    return Counters(**{**values, **changes})


def make_result(
    policy: str = "lru",
    slots: int | tuple[int, ...] = 192,
    hit_rate: float = 0.5,
    concurrency: int = 1,
    declined: float = 0.0,
    tokens: int = 1000,
    **changes: Any,
) -> Result:
    """A cell with about the given hit rate and share of misses declined; ``changes`` override."""
    groups = (slots,) if isinstance(slots, int) else slots
    on_decline = changes.get("on_decline", "cpu")
    steps = tokens // concurrency
    lookups = steps * LAYERS * min(EXPERTS, round(K * concurrency * 0.8 + K * 0.2))
    hits = round(lookups * hit_rate)
    parts = [lookups // LAYERS] * LAYERS
    total = make_counters(lookups, hits, round((lookups - hits) * declined), on_decline, steps)
    by_layer = []
    for layer, part in enumerate(parts):
        found = min(part, round(part * hit_rate * (0.9 + 0.2 * layer / (LAYERS - 1))))
        by_layer.append({"layer": layer, "lookups": part, "hits": found, "misses": part - found})
    uploaded = total.demand_uploads + total.streamed
    n_keys = LAYERS * EXPERTS
    values: dict[str, Any] = {
        "trace_hash": "8d1f0c3e55aa9b10",
        "layout_hash": "51c2a7be90d3f644",
        "trace_name": "gptoss20b_decode_a",
        "model": "gpt-oss-20b",
        "synthetic": False,
        "policy": policy,
        "policy_version": 1,
        "policy_hash": "a1b2c3d4e5f60718",
        "params": {},
        "bound": policy.startswith("opt"),
        "needs_engine_change": declined > 0,
        "semantics": "llama.cpp",
        "pool": "shared",
        "on_decline": on_decline,
        "prefill": "engine",
        "schedule": "lanes",
        "concurrency": concurrency,
        "slots": groups,
        "n_keys": n_keys,
        "slots_share": sum(groups) / n_keys,
        "capacity_bytes": sum(groups) * EXPERT_BYTES,
        "seed": 0,
        "kind": "simulated",
        "counters": total,
        "hit_rate": hits / lookups,
        "pick_hit_rate": hits / lookups,
        "mib_per_token": uploaded * EXPERT_BYTES / 2**20 / tokens,
        "uploads_per_token": total.demand_uploads / tokens,
        "busy_lanes": float(concurrency),
        "cycle": {"min": LAYERS * K, "median": LAYERS * K, "max": LAYERS * K}
        if concurrency == 1
        else {
            "min": 40 * concurrency,
            "median": 70 * concurrency,
            "max": min(n_keys, 92 * concurrency),
        },
        "cliff_slots": (LAYERS - 1) * K if concurrency == 1 else 70 * concurrency,
        "cliff_share": ((LAYERS - 1) * K if concurrency == 1 else 70 * concurrency) / n_keys,
        "peak_bytes": None,
        "by_class": {"<=8" if concurrency <= 8 else "9-32": total},
        "by_phase": {"decode": total},
        "by_layer": by_layer,
        "by_request": [{"request": 0, "picks": total.picks, "pick_hits": total.pick_hits}],
        "windows": [{"first_step": 0, "last_step": steps - 1, "lookups": lookups, "hits": hits}],
        "notes": (),
        "provenance": {
            "command": "simlab replay gptoss20b_decode_a --policy lru",
            "versions": {"simlab": "0.1.0", "numba": "0.68.0"},
            "host": "Linux x86_64, 2 CPUs",
            "started": "2026-11-30T04:00:00Z",
        },
    }
    return Result(**{**values, **changes})
