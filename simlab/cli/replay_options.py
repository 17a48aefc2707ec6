"""The options of ``simlab replay``, most of which ``simlab curve`` has too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import click

from simlab.cli.layout_options import layout_options

# The lab's commands (lab_options.py) have these too.
MIB = click.option(
    "--moe-cache-mib",
    "--mib",
    "mib",
    metavar="N,...",
    help="Budget as for llama.cpp's option of that name, in place of --slots.",
)
CONCURRENCY = click.option(
    "--concurrency",
    default="1",
    show_default=True,
    metavar="C,...",
    help="Streams decoded together.",
)
SEMANTICS = click.option(
    "--semantics",
    default="llama.cpp",
    show_default=True,
    help="Which engine's rules: llama.cpp, sglang, bmoe or per-pick.",
)
PREFILL = click.option(
    "--prefill",
    default="engine",
    show_default=True,
    help="engine: prompts are computed; skip: their rows are left out.",
)
SCHEDULE = click.option(
    "--schedule",
    default="lanes",
    show_default=True,
    help="lanes, or recorded: the steps that the trace recorded.",
)
UBATCH = click.option(
    "--ubatch", default=512, show_default=True, help="Most tokens of a prefill step."
)

_POLICIES = [
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
]
_SLOTS = [
    click.option(
        "--slots",
        metavar="N|P%|A-B:STEP,...",
        help="Slots per group (sglang: layer), or a share of its experts.  [default: 10%,25%,50%]",
    ),
]
_ENGINE = [
    MIB,
    click.option(
        "--layout",
        metavar="GGUF|CONFIG|NAME",
        help="A model whose groups and bytes take the place of the trace's (see: simlab plan).",
    ),
    CONCURRENCY,
    SEMANTICS,
    click.option(
        "--on-decline",
        default="stream",
        show_default=True,
        help="Who serves a miss the policy declines: stream (copied once) or cpu.",
    ),
    PREFILL,
    SCHEDULE,
    UBATCH,
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
]
_BASELINES = [
    click.option(
        "--baselines",
        metavar="NAME,...|all",
        help="Engines without a cache too: stream-all, stream-picks, cpu-moe, n-cpu-moe.",
    ),
]
_REST = [
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


_CURVE_SIZES = [
    click.option(
        "--slots",
        metavar="N|P%|A-B:STEP,...",
        help="Sizes: slots per group (sglang: layer), shares of its experts, ranges of either."
        "  [default: 1, each 1% up to 20%, then each 2.5%]",
    ),
    click.option(
        "--sizes", type=int, metavar="N", help="N evenly spaced sizes up to all experts instead."
    ),
    click.option(
        "--approx",
        is_flag=True,
        help="Replay some sizes, interpolate the others, and print the error measured.",
    ),
]


def replay_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``simlab replay`` to the command."""
    return _add(command, [*_POLICIES, *_SLOTS, *_ENGINE, *_BASELINES, *_REST])


def curve_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of ``simlab curve`` to the command."""
    return _add(command, [*_POLICIES, *_CURVE_SIZES, *_ENGINE, *_REST])


def _add(command: Callable[..., Any], options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    for option in reversed(options):
        command = option(command)
    return layout_options(command)
