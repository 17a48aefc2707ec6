"""``simlab plan``: what a cache budget buys for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from simlab.cli.layout_options import layout_options
from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.model.placement import Placement


@click.command("plan")
@click.argument("model", required=False)
@click.option(
    "--model", "named", metavar="DIR|FILE|NAME", help="The same as MODEL, for a config or a name."
)
@click.option(
    "--moe-cache-mib", "--mib", "mib", type=float, metavar="N", help="The budget, as in llama.cpp."
)
@click.option("--slots", type=int, metavar="N", help="Find the budget for N slots a group.")
@click.option(
    "--vram",
    metavar="24GiB,...",
    help="Find the budget that this device memory leaves (several devices: one size each).",
)
@click.option(
    "--reserve",
    metavar="SIZE",
    help="With --vram: left free on each device for the KV cache and buffers.  [default: 2GiB]",
)
@layout_options
@click.option(
    "--concurrency", default=1, show_default=True, metavar="C", help="Streams decoded together."
)
@click.option("--napkin", "as_napkin", is_flag=True, help="Bytes and time a token over a link.")
@click.option(
    "--link",
    default="pcie4x16,pcie5x16",
    show_default=True,
    metavar="LINK,...",
    help="With --napkin: pcie3x4 to pcie5x16 (specified speed), or GB/s.",
)
@click.option(
    "--hit-rate", default="0", show_default=True, metavar="P,...", help="With --napkin: per cent."
)
@click.option("--list", "list_models", is_flag=True, help="List the models known by name.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str | None,
    named: str | None,
    mib: float | None,
    slots: int | None,
    vram: str | None,
    reserve: str | None,
    dtype: str | None,
    n_cpu_moe: int | None,
    host_layers: str | None,
    tensor_split: str | None,
    concurrency: int,
    as_napkin: bool,
    link: str,
    hit_rate: str,
    list_models: bool,
    as_json: bool,
) -> None:
    """Tell how many slots a cache budget buys, and the smallest that starts.

    MODEL is a GGUF file (any file of a split model; headers alone are read), a folder or file with
    a Hugging Face config.json, or a name (see --list).
    """
    import json

    from simlab.cli.plan_text import catalogue_lines, napkin_lines, plan_lines
    from simlab.model.napkin import napkin
    from simlab.model.placement import DEFAULT_RESERVE, budget_from_memory, parse_bytes, place
    from simlab.model.plan import plan

    if list_models:
        from simlab.model.catalogue import entries

        click.echo(json.dumps(entries()) if as_json else "\n".join(catalogue_lines(entries())))
        return
    if (model is None) == (named is None):
        raise UsageError("name one model: a GGUF file, a config.json, or a name (--list)")
    sizes = [] if vram is None else [parse_bytes(part, "--vram") for part in vram.split(",")]
    placement = place(
        model if model is not None else str(named),
        dtype=dtype,
        host_layers=host_layers,
        n_cpu_moe=n_cpu_moe,
        tensor_split=tensor_split,
        vram=sizes,
    )
    if as_napkin:
        rates = [_rate(part) for part in hit_rate.split(",")]
        figures = napkin(placement.shape, link.split(","), rates)
        told = {**_about(placement), "napkin": figures.to_dict()}
        click.echo(json.dumps(told) if as_json else "\n".join(napkin_lines(placement, figures)))
        return
    if [mib, slots, vram].count(None) != 2:
        raise UsageError("give one of --moe-cache-mib, --slots and --vram (or --napkin)")
    notes = list(placement.shape.notes)
    if vram is not None:
        kept = parse_bytes(reserve or DEFAULT_RESERVE, "--reserve")
        mib = budget_from_memory(placement, sizes, kept)
        notes.append(
            f"{kept / 2**20:,.0f} MiB a device left for the KV cache and compute buffers:"
            f" {'as you said' if reserve else 'a rule of thumb, say yours with --reserve'}"
        )
    found = plan(
        placement.layout, mib=mib, slots=slots, split=placement.split, concurrency=concurrency
    )
    if as_json:
        click.echo(json.dumps({**_about(placement), "notes": notes, **found.to_dict()}))
    else:
        click.echo("\n".join(plan_lines(placement, found, notes)))


def _rate(text: str) -> float:
    try:
        return float(text.strip().rstrip("%")) / 100
    except ValueError:
        raise UsageError(f"--hit-rate takes percentages such as 77,89, not {text!r}") from None


def _about(placement: Placement) -> dict[str, object]:
    shape, layout = placement.shape, placement.layout
    return {
        "model": shape.name,
        "source": shape.source,
        "layout_hash": layout.hash,
        "moe_layers": list(shape.experts),
        "resident_layers": list(layout.resident),
        "n_expert": shape.n_expert,
        "k": shape.k,
        "expert_bytes": shape.expert_bytes,
        "device_bytes": placement.device_bytes,
    }
