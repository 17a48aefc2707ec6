"""Writes docs/capture-architectures.md: what capturing sees, beside the experts that executed.

Run in an environment with torch and transformers: ``python scripts/architecture_table.py``. It
builds the tiny models of tests/architectures.py, the same ones that the tests compare.
"""

from __future__ import annotations

import re
import sys
import warnings
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

HEAD = """# Architectures whose router picks simlab captures

Written by `scripts/architecture_table.py` with torch {torch} and transformers {transformers}; the
tests compare the same models (`tests/test_capture_architectures.py`).

**How it is checked.** Each architecture is built tiny, with random weights (8 experts, mostly 3
picks a token, 24 tokens), and its picks are captured in a forward pass. Then, for each MoE layer
and each expert, that expert's down-projection is scaled and the layer runs again on the same input:
the rows of its output that change are the tokens that the expert worked on. A *pick* below is a
(token, layer, expert) that was captured or that executed; it agrees if it was both. Random weights
show that ids are read rightly. They say nothing about hit rates, and none are derived from them.

**How ids are read.** At the experts module, as the argument that it is called with; a module is
known by its forward: `experts(hidden_states, top_k_index, top_k_weights)`. Nothing is recomputed
from the router's logits: where a bias, groups of experts or a hash take part in the choice, the
best logits are not the picks. `module` is the path of the hooked module; its number is the layer.

| architecture | class | module | MoE layers | picks | agree | how it is read |
|---|---|---|---:|---:|---:|---|
"""

TAIL = """
{count} architectures, {checked} picks, {agreed} agree.

## Not captured

| architecture | reason |
|---|---|
{refused}| Inkling2Loop | its layers run several times in one forward pass; a trace has one row a \
token and layer; refused at the second call |
| DiffusionGemma | no token after token: a block of text is refined in several passes |
| Qwen3-Omni talker | its experts speak audio codes, not text; the thinker is captured |
| image and audio experts (Ernie 4.5 VL, dots3-note, VitPose) | no text tokens; the text part of \
the first two is captured |
| Bamba and other hybrids without experts | no MoE layer |
| fused kernels that replace a whole MoE block | the experts module is not called; refused, naming \
the layer |

Encoder-decoder models (Switch) are read rightly in whole forward passes, but a trace has one
sequence of tokens: their runs are refused.

## Other models

Any torch module whose experts are called as `experts(hidden_states, ids, weights)` is understood,
the names of the last two telling what they are. For all others say where the ids are:

    --hook "model.layers.*.mlp.experts:1"       the argument after the first
    --hook "model.layers.*.mlp.experts:picks"   the argument of that name
    --hook "model.layers.*.mlp.gate:out.1"      the second thing that the module returns

The pattern is the path of the modules, `*` for anything. A model of which some experts module is
not understood, or of which a hooked layer is not called exactly once in a forward pass, stops the
capture with the layer's name: a trace never lacks a layer silently.
"""


def main() -> None:
    """Compare every case and write the page."""
    warnings.filterwarnings("ignore")
    import torch
    import transformers
    from architectures import CASES, build, compare

    from simlab.capture.adapters import REFUSED

    torch.set_num_threads(1)
    lines = []
    total = right = 0
    for case in CASES:
        sites, checked, agreed = compare(build(case))
        path = re.sub(r"\.\d+\.", ".N.", sites[0].path, count=1)
        note = sites[0].adapter.note or case.note or "arguments"
        lines.append(
            f"| {case.name} | `{case.model}` | `{path}` | {len(sites)} | {checked} |"
            f" {100 * agreed / checked:.0f} % | {note} |\n"
        )
        print(lines[-1], end="")
        total, right = total + checked, right + agreed
    names = {"NllbMoeExperts": "NLLB-MoE", "DogeCDMoE": "Doge"}
    page = HEAD.format(torch=torch.__version__.split("+")[0], transformers=transformers.__version__)
    page += "".join(lines) + TAIL.format(
        count=len(CASES),
        checked=total,
        agreed=right,
        refused="".join(f"| {names[k]} | {reason} |\n" for k, reason in REFUSED.items()),
    )
    (ROOT / "docs" / "capture-architectures.md").write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
