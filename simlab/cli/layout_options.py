"""Options that say where a model's experts live, shared by the commands that take a model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

_OPTIONS = [
    click.option(
        "--dtype",
        metavar="TYPE[,TYPE,TYPE]",
        help="Types of the gate, up and down matrices, for a config or a name: Q4_0, MXFP4, ...",
    ),
    click.option(
        "--n-cpu-moe",
        type=click.IntRange(1),
        metavar="N",
        help="Only the first N layers have their experts in host memory, as in llama.cpp.",
    ),
    click.option(
        "--host-layers",
        metavar="0-19,40",
        help="The layers that have their experts in host memory.  [default: all]",
    ),
    click.option(
        "--tensor-split",
        metavar="3,1",
        help="Share of each of several devices, as in llama.cpp.",
    ),
]


def layout_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command
