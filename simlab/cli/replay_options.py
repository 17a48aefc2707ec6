"""The options of ``simlab replay``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from simlab.cli.layout_options import layout_options

_OPTIONS = [
    click.option(
        "--policy",
        "policies",
        multiple=True,
        default=["lru"],
        show_default=True,
        metavar="NAME|FILE,...",
        help="Policies by name or file, or 'all' (see: simlab policies list); may be repeated.",
    ),
    click.option(
        "--param", "params", multiple=True, metavar="NAME=VALUE", help="A policy's parameter."
    ),
    click.option(
        "--slots",
        metavar="N|P%,...",
        help="Slots per group (sglang: layer), or a share of its experts.  [default: 10%,25%,50%]",
    ),
    click.option(
        "--moe-cache-mib",
        "--mib",
        "mib",
        metavar="N,...",
        help="Budget as for llama.cpp's option of that name, in place of --slots.",
    ),
    click.option(
        "--layout",
        metavar="GGUF|CONFIG|NAME",
        help="A model whose groups and bytes take the place of the trace's (see: simlab plan).",
    ),
    click.option(
        "--concurrency",
        default="1",
        show_default=True,
        metavar="C,...",
        help="Streams decoded together.",
    ),
    click.option(
        "--semantics",
        default="llama.cpp",
        show_default=True,
        help="Which engine's rules: llama.cpp, sglang, bmoe or per-pick.",
    ),
    click.option(
        "--on-decline",
        default="stream",
        show_default=True,
        help="Who serves a miss the policy declines: stream (copied once) or cpu.",
    ),
    click.option(
        "--prefill",
        default="engine",
        show_default=True,
        help="engine: prompts are computed; skip: their rows are left out.",
    ),
    click.option(
        "--schedule",
        default="lanes",
        show_default=True,
        help="lanes, or recorded: the steps that the trace recorded.",
    ),
    click.option("--ubatch", default=512, show_default=True, help="Most tokens of a prefill step."),
    click.option(
        "--seed", default=0, show_default=True, help="For policies that draw random numbers."
    ),
    click.option(
        "--capacity",
        metavar="FILE",
        help="A CSV step,share: what share of its slots a pool has from a step on.",
    ),
    click.option(
        "--draft",
        default=0,
        show_default=True,
        metavar="N",
        help="Drafted tokens that each stream verifies in a step (approximate).",
    ),
    click.option(
        "--acceptance",
        default=1.0,
        show_default=True,
        help="With --draft: chance that a drafted token is accepted.",
    ),
    click.option(
        "--baselines",
        metavar="NAME,...|all",
        help="Engines without a cache too: stream-all, stream-picks, cpu-moe, n-cpu-moe.",
    ),
    click.option(
        "--pin",
        default=0,
        show_default=True,
        metavar="N",
        help="Experts of each layer that stay resident, in room taken from the pools.",
    ),
    click.option(
        "--pin-from", metavar="TRACE", help="The trace whose most picked experts are pinned."
    ),
    click.option(
        "--n-expert", type=int, help="Experts of a layer, for a file that does not say it."
    ),
    click.option(
        "--jobs", type=click.IntRange(1), help="Cells replayed at a time.  [default: cores]"
    ),
    click.option("--json", "as_json", is_flag=True, help="Print the result rows as a JSON list."),
    click.option(
        "--out", metavar="FILE", help="Write the result rows to a .json or .parquet file."
    ),
]


def replay_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to the command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return layout_options(command)
