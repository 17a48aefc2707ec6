"""``simlab check-log``: a llama.cpp log beside simlab's own figures."""

from __future__ import annotations

from typing import Any

import click

from simlab.cli.layout_options import layout_options


@click.command("check-log")
@click.argument("log")
@click.option(
    "--layout", required=True, metavar="GGUF|CONFIG|NAME", help="The model of the logged run."
)
@click.option(
    "--moe-cache-mib", "--mib", "mib", type=click.IntRange(1), help="Its budget, if it is known."
)
@layout_options
@click.option("--trace", metavar="TRACE", help="Picks to replay for the hit rates.")
@click.option("--concurrency", default=1, show_default=True, help="Streams of the logged run.")
@click.option("--ubatch", default=512, show_default=True, help="Most tokens of a prefill step.")
@click.option("--n-expert", type=int, help="Experts of a layer, for a trace that does not say it.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.pass_context
def command(
    ctx: click.Context,
    log: str,
    layout: str,
    mib: int | None,
    dtype: str | None,
    n_cpu_moe: int | None,
    host_layers: str | None,
    tensor_split: str | None,
    trace: str | None,
    concurrency: int,
    ubatch: int,
    n_expert: int | None,
    as_json: bool,
) -> None:
    """Set what llama.cpp logged of its expert cache beside what simlab computes.

    LOG is what llama-server printed with -lv 4. Slots must agree, else the exit code is 1; hit
    rates agree as far as TRACE holds the picks of the logged run.
    """
    import dataclasses
    import json

    from simlab.analysis.check_log import check_slots
    from simlab.analysis.llamacpp_log import read_log
    from simlab.model.placement import place

    found = read_log(log)
    placement = place(
        layout,
        dtype=dtype,
        host_layers=host_layers,
        n_cpu_moe=n_cpu_moe,
        tensor_split=tensor_split,
    )
    check = check_slots(found, placement.layout, mib=mib, split=placement.split)
    if trace is not None:
        options = {"concurrency": concurrency, "ubatch": ubatch, "n_expert": n_expert}
        more = _replayed(found, placement, check, trace, options)
        check = dataclasses.replace(check, lines=(*check.lines, *more))
    if as_json:
        click.echo(json.dumps({"log": log, "model": placement.shape.name, **check.to_dict()}))
    else:
        _print(log, placement.shape.name, check)
    if not check.slots_agree:
        ctx.exit(1)


def _replayed(found: Any, placement: Any, check: Any, trace: str, options: Any) -> Any:
    """The lines about hits: the trace replayed with the logged slots, else the predicted ones."""
    from simlab.analysis.check_log import check_counters, logged_slots
    from simlab.analysis.logged_run import replay_logged
    from simlab.errors import UsageError
    from simlab.model.budget import slots_for_budget

    slots = logged_slots(found, placement.layout)
    if slots is None:
        if check.mib is None:
            raise UsageError(
                "the log's groups are not those of the layout: give --moe-cache-mib for the replay"
            )
        slots = slots_for_budget(placement.layout, check.mib, placement.split)[0]
    classes, copied = replay_logged(trace, placement, slots, **options)
    return check_counters(found, classes, copied)


def _print(log: str, model: str, check: Any) -> None:
    click.echo(f"{log}  (model: {model})\nlogged: llama.cpp; predicted: simlab\n")
    wide = max(len(line.what) for line in check.lines)
    logged = max(len("logged"), *(len(line.logged) for line in check.lines))
    click.echo(f"{'':<{wide}}  {'logged':<{logged}}  predicted")
    for line in check.lines:
        mark = {True: "", False: "  DIFFERS", None: ""}[line.same]
        click.echo(f"{line.what:<{wide}}  {line.logged:<{logged}}  {line.predicted}{mark}")
        if line.reason:
            click.echo(f"{'':<{wide}}  likely: {line.reason}")
    click.echo(
        "\nslots and bytes agree" if check.slots_agree else "\nslots or bytes differ (exit code 1)"
    )
