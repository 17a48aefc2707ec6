"""All that a CUDA machine is needed for, in one command that ends within six minutes:

    python3 scripts/gpu_check

Capture on the GPU with its overhead; the link's profile; trace in the loop with the experts of
Qwen3-30B-A3B Q4_K_M on a real trace, under four ways of serving at three sizes and two levels of
concurrency, every lookup and byte compared with the simulation; the demo model with its experts in
a slot pool, compared with itself without one. JSON files go to ``--out``; a short table comes last.
Exit code 1 where a check failed.

It runs from the checkout, without a network. The machine needs Python 3.11 with torch, numpy,
numba, pyarrow, click, transformers and what those bring along; polars, pandas, plotly and rich are
not used, so there are no wheels to carry.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPO = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(REPO), str(Path(__file__).resolve().parent), str(REPO / "scripts")]

from model import model_part  # noqa: E402
from parts import capture_part, live_part, probe_part  # noqa: E402

from simlab.errors import SimlabError  # noqa: E402


def time_is_up(*_: object) -> None:
    """A part that takes too long ends here; what it had finished is in its files."""
    raise SimlabError("the time was up")


def main() -> int:
    """Run the parts one after the other; one that fails does not keep the others from running."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:N, or cpu to try it out")
    parser.add_argument("--out", default="out/gpu_check", help="folder for the JSON files")
    parser.add_argument("--seconds", type=float, default=330, help="for everything")
    parser.add_argument("--small", action="store_true", help="small experts and few cases")
    options = parser.parse_args()
    out = Path(options.out)
    out.mkdir(parents=True, exist_ok=True)
    os.environ.setdefault("SIMLAB_CACHE_DIR", str(out / "cache"))
    ends = time.monotonic() + options.seconds
    parts: dict[str, Callable[..., dict[str, Any]]] = {
        "probe": probe_part,
        "trace in the loop": live_part,
        "capture": capture_part,
        "model in the loop": model_part,
    }
    signal.signal(signal.SIGALRM, time_is_up)
    done: dict[str, dict[str, Any]] = {}
    table: list[str] = []
    for name, part in parts.items():
        started = time.monotonic()
        print(f"== {name}", flush=True)
        try:
            if ends - started < 5:
                raise SimlabError("no time was left for it")
            signal.setitimer(signal.ITIMER_REAL, ends - started)
            found = part(options.device, out, ends, small=options.small)
        except Exception as exc:
            if not isinstance(exc, SimlabError):
                traceback.print_exc()
            reason = " ".join(str(exc).split())[:300]
            found = {"ok": False, "lines": [f"FAILED: {type(exc).__name__}: {reason}"]}
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
        found["seconds"] = round(time.monotonic() - started, 1)
        done[name] = found
        table += [f"{name} ({found['seconds']:.0f} s): {'ok' if found['ok'] else 'NOT OK'}"]
        table += [f"    {line}" for line in found["lines"]]
    (out / "summary.json").write_text(json.dumps(done, indent=1) + "\n")
    print("\n" + "\n".join(table))
    print(f"JSON files: {out}")
    return 0 if all(found["ok"] for found in done.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
