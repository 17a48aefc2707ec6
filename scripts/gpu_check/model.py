"""The part of gpu_check that runs the demo model with its experts in a slot pool."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from simlab.live.device import open_device
from simlab.policy.registry import load_policy
from simlab.replay.sizes import parse_sizes
from simlab.result.schema import Result
from simlab.result.store import write_results

COMMAND = "python3 scripts/gpu_check"
#: path -> policies, sizes (8: the smallest pool with a cached path), concurrency levels
CASES = {
    "reference": (("lru", "mix", "lfu-decay"), "8,50%,100%", (1, 4)),
    "fast": (("lru", "lfu-decay"), "8,50%,100%", (1, 4)),
}


def model_part(device_name: str, out: Path, ends: float, *, small: bool) -> dict[str, Any]:
    """Model in the loop: the replay's counters, and on the reference path the model's own bits."""
    from simlab.capture.engine import Settings
    from simlab.capture.load import load
    from simlab.capture.prompts import demo_prompts
    from simlab.live.model_loop import ModelCell, ModelRun, Options, run_model

    settings = Settings(max_new_tokens=3 if small else 12)
    lines, ok = [], True
    rows: list[Result] = []
    for path, (policies, sizes, levels) in CASES.items():
        cells = [
            ModelCell(load_policy(policy), size, level)
            for level in (levels[:1] if small else levels)
            for size in parse_sizes(sizes)
            for policy in (policies[-1:] if small else policies)
        ]
        found: list[ModelRun] = []
        with open_device(device_name) as device:
            loaded = load("demo", device=device.kind)
            runs = run_model(
                loaded, demo_prompts()[:: 12 if small else 6], device, settings, cells,
                Options(path=path), command=COMMAND,
            )  # fmt: skip
            for one in runs:
                found.append(one)
                if ends - time.monotonic() < 20:
                    break
        rows += [row for one in found for row in one.rows]
        write_results(rows, out / "model.json")
        bits = sum(bool(one.comparison and one.comparison.identical) for one in found)
        equal = sum(one.check.equal for one in found)
        wrong = [one.failed for one in found if one.failed]
        ok &= not wrong and len(found) == len(cells)
        lines.append(
            f"{path} path: {len(found)} of {len(cells)} cells, {equal} with the replay's counters,"
            f" {bits} with every bit of the model without a pool"
        )
        lines += [f"NOT OK: {why}" for why in wrong[:2]]
        apart = [c.why for one in found if (c := one.comparison) and c.why]
        if path == "fast" and apart:
            lines.append(f"{path} path: {apart[0]}")
    return {"ok": ok, "lines": lines}
