"""``simlab inspect``: what is in a trace."""

from __future__ import annotations

import click


@click.command("inspect")
@click.argument("trace", required=False)
@click.option("--n-expert", type=int, help="Experts of a layer, for a file that does not say it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(trace: str | None, n_expert: int | None, as_json: bool) -> None:
    """Show what is in a trace: shape, reuse, popular experts, cycle.

    Without TRACE the sample that ships with simlab is shown; it is synthetic. The other sample,
    tiny-demo-model, goes by its name. "Signs of bad data" are for dumps of other tools: padding,
    warm-up batches, prompts of one template.
    """
    import json
    import textwrap

    from simlab.analysis.inspect import describe, inspect_trace
    from simlab.resources import find_trace
    from simlab.trace.read import read_trace

    path = find_trace(trace)
    found = inspect_trace(read_trace(path, n_expert=n_expert))
    if as_json:
        click.echo(json.dumps({"trace": str(path), **found.to_dict()}, indent=2))
        return
    label = "SYNTHETIC, not captured from a model" if found.meta.kind == "synthetic" else ""
    if trace is None:
        label = f"the sample that ships with simlab; {label}"
    click.echo(f"{path}{f'  ({label})' if label else ''}")
    sections = describe(found)
    width = max(len(name) for _, lines in sections for name, _ in lines)
    for heading, lines in sections:
        click.echo(f"\n{click.style(heading, bold=True)}")
        for name, value in lines:
            indent = " " * (width + 4)
            text = textwrap.fill(value, 100, initial_indent=indent, subsequent_indent=indent)
            click.echo(f"  {name:<{width}}  {text.lstrip()}")
