"""``simlab advise``: the command line to type for a model, a machine and a text."""

from __future__ import annotations

import click

from simlab.errors import UsageError


@click.command("advise")
@click.argument("model", required=False)
@click.option("--gguf", "--model", "named", metavar="GGUF|CONFIG|NAME", help="The same as MODEL.")
@click.option("--dtype", metavar="TYPE,...", help="Types of the experts, for a config or a name.")
@click.option("--vram", required=True, metavar="24GiB", help="Memory of the GPU.")
@click.option("--ram", metavar="128GiB", help="Host memory.  [default: not checked]")
@click.option(
    "--link",
    default="pcie4x16",
    show_default=True,
    metavar="LINK",
    help="pcie3x4 to pcie5x16 (80 % of the specified speed), or measured GB/s (simlab probe).",
)
@click.option("--trace", metavar="FILE", help="Router picks of this model, on text like yours.")
@click.option("--ctx", default=8192, show_default=True, metavar="N", help="Context of a stream.")
@click.option("--parallel", default=1, show_default=True, metavar="C", help="Streams at a time.")
@click.option(
    "--gpu", default="rtx4090", show_default=True, metavar="NAME|GB/s", help="Its memory's speed."
)
@click.option(
    "--cpu", default="ddr5x2", show_default=True, metavar="NAME|GB/s", help="Host memory's speed."
)
@click.option("--step-ms", type=float, metavar="MS", help="A measured step without any miss.")
@click.option("--reserve", default="1GiB", show_default=True, help="Left to buffers.")
@click.option("--other-bytes", metavar="SIZE", help="Weights beside the experts, if not a GGUF.")
@click.option("--kv-bytes", type=int, metavar="N", help="KV cache of a token, if not a GGUF.")
@click.option("--policy", default="lru", show_default=True, help="Of the cache.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    model: str | None,
    named: str | None,
    dtype: str | None,
    vram: str,
    ram: str | None,
    link: str,
    trace: str | None,
    ctx: int,
    parallel: int,
    gpu: str,
    cpu: str,
    step_ms: float | None,
    reserve: str,
    other_bytes: str | None,
    kv_bytes: int | None,
    policy: str,
    as_json: bool,
) -> None:
    """Find the placement of MODEL's experts that is predicted to decode fastest.

    Device memory goes to whole layers of experts, to an expert cache, or to context. Each placement
    is replayed with --trace and timed by a model: nothing is measured. Without --trace the sample
    that ships with simlab is taken where it fits; it is synthetic.
    """
    import json
    import os
    from dataclasses import replace

    from simlab.analysis.advise import Adviser, Machine
    from simlab.cli.advise_text import advice_dict, advice_lines
    from simlab.cli.progress import bar
    from simlab.cost.presets import device_rate, host_rate, link_rate
    from simlab.model.kv import kv_bytes_per_token, longest_context
    from simlab.model.placement import parse_bytes
    from simlab.model.source import read_model
    from simlab.resources import find_trace
    from simlab.trace.read import read_trace

    if (model is None) == (named is None):
        raise UsageError("name one model: a GGUF file, a Hugging Face config, or a catalogue name")
    for option, number in (("--ctx", ctx), ("--parallel", parallel)):
        if not 0 < number < 2**31:
            raise UsageError(f"{option} must be 1 or more, not {number}")
    if step_ms is not None and not 0 < step_ms < 1e6:
        raise UsageError(f"--step-ms must be above 0, not {step_ms:g}")
    machine = Machine(
        vram=parse_bytes(vram, "--vram"),
        ram=None if ram is None else parse_bytes(ram, "--ram"),
        reserve=parse_bytes(reserve, "--reserve"),
        link=link_rate(link),
        device=device_rate(gpu),
        cpu=host_rate(cpu),
        step_ms=step_ms,
    )
    shape = read_model(str(model or named), dtype=dtype)
    if other_bytes is not None:
        shape = replace(shape, other_bytes=parse_bytes(other_bytes, "--other-bytes"))
    kv_token = kv_bytes if kv_bytes is not None else kv_bytes_per_token(shape.metadata)
    if kv_token is None or kv_token < 0:
        raise UsageError(
            f"{shape.source} does not tell the size of its KV cache; give --kv-bytes per token"
            " (layers x KV heads x (key + value length) x 2)"
        )
    path = str(find_trace(trace))
    adviser = Adviser(
        shape,
        machine,
        read_trace(path),
        kv_token=kv_token,
        context=ctx,
        streams=parallel,
        policy=policy,
        trace_name=os.path.basename(path),
    )
    longest = max(longest_context(shape.metadata) or 131072, ctx)
    with bar("Predicting", 10) as advance:
        choices = adviser.search(lambda: advance(1) if advance else None)
        best = choices[0]
        choices += adviser.with_pins(best)
        worth = adviser.worth_of_a_gib(best)
        contexts = adviser.contexts(best, longest)
    if as_json:
        click.echo(json.dumps(advice_dict(adviser, choices, worth, contexts)))
        return
    for line in advice_lines(adviser, choices, worth, contexts):
        click.echo(line)
