"""``simlab import``: other tools' router picks become a trace."""

from __future__ import annotations

from pathlib import Path

import click


@click.command("import")
@click.argument("file", type=click.Path(path_type=Path))
@click.option(
    "--from",
    "source_kind",
    required=True,
    type=click.Choice(["parquet", "bmoe"]),
    help="parquet: rows request, token, layer, experts. bmoe: BigMoeOnEdge route CSV.",
)
@click.option("--out", "-o", required=True, type=click.Path(path_type=Path), help="Trace to write.")
@click.option("--n-expert", type=int, help="Experts of a layer, if the file does not say it.")
@click.option("--k", type=int, help="Most picks of a row; default: the most seen.")
@click.option("--model", help="Name of the model.")
@click.option(
    "--expert-bytes",
    metavar="SPEC",
    help="Bytes of one expert: N, or 0-23:N,24-47:M by layer; N may be A+B+C, one a tensor.",
)
@click.option(
    "--phase",
    type=click.Choice(["column", "prefill", "decode"]),
    default="column",
    show_default=True,
    help="What all rows are; 'column': as the file says, decode if it does not.",
)
@click.option("--source", metavar="TEXT", help="Where the picks come from; default: the file name.")
@click.option(
    "--drop-dummies",
    is_flag=True,
    help="Leave out tokens no text made: zero padding, rows of all experts, long runs of equal"
    " tokens. They are counted.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    file: Path,
    source_kind: str,
    out: Path,
    n_expert: int | None,
    k: int | None,
    model: str | None,
    expert_bytes: str | None,
    phase: str,
    source: str | None,
    drop_dummies: bool,
    as_json: bool,
) -> None:
    """Turn another tool's router picks into a trace.

    The rows of FILE are sorted, checked, and written with where they come from.
    """
    import json

    from simlab.cli.invocation import command_line
    from simlab.trace.importers import import_trace
    from simlab.trace.importers.options import ImportOptions
    from simlab.trace.stats import token_starts
    from simlab.trace.write import write_trace

    options = ImportOptions(
        n_expert=n_expert,
        k=k,
        model=model,
        expert_bytes=expert_bytes,
        phase=phase,
        source=source,
        command=command_line(),
        drop_dummies=drop_dummies,
    )
    trace = import_trace(source_kind, file, options)
    meta = write_trace(trace, out)
    shape = {
        "trace": str(out),
        "tokens": len(token_starts(trace.request, trace.token)),
        "rows": trace.n_rows,
        "picks": trace.n_picks,
        "moe_layers": len(meta.moe_layers),
        "n_expert": meta.n_expert,
        "k": meta.k,
        "notes": list(meta.notes),
        "content_hash": meta.content_hash,
    }
    if as_json:
        click.echo(json.dumps(shape, indent=2))
        return
    click.echo(
        f"{out}: {shape['tokens']:,} tokens, {trace.n_rows:,} rows, {trace.n_picks:,} picks,"
        f" {len(meta.moe_layers)} layers x {meta.n_expert} experts, k = {meta.k}"
    )
    for note in meta.notes:
        click.echo(note)
    if not meta.expert_bytes:
        click.echo("bytes of an expert unknown: give --expert-bytes to have bytes moved")
