"""``simlab live --model``: the options and the output of the model in the loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from simlab.errors import SimlabError, UsageError

if TYPE_CHECKING:
    from simlab.live.model_loop import ModelRun

_OPTIONS = (
    click.option(
        "--model",
        metavar="demo|DIR",
        help="Run this model in place of a trace, its experts computed from the slots.",
    ),
    click.option(
        "--prompts",
        multiple=True,
        metavar="FILE|DIR",
        help="As of simlab capture.  [default: some of the embedded texts]",
    ),
    click.option("--max-prompt-tokens", type=click.IntRange(1), metavar="N", help="Cut prompts."),
    click.option("--max-new-tokens", default=32, show_default=True, metavar="N"),
    click.option("--ignore-eos", is_flag=True, help="Generate on after an end-of-text token."),
    click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16..."),
    click.option(
        "--path",
        default="reference",
        show_default=True,
        help="reference: bit-identical to the model without a pool; fast: one grouped product.",
    ),
    click.option("--no-compare", is_flag=True, help="Do not run the model without a pool."),
    click.option("--save-trace", metavar="FILE", help="Keep the trace captured on the way."),
)
_NAMES = frozenset({
    "model", "prompts", "max_prompt_tokens", "max_new_tokens", "ignore_eos", "dtype", "path",
    "no_compare", "save_trace",
})  # fmt: skip
#: what goes with --model of the options that TRACE takes
_SHARED = frozenset({
    "policies", "params", "slots", "concurrency", "device_name", "on_decline", "seed", "ubatch",
    "as_json", "out",
})  # fmt: skip


def model_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options of --model, which reach the command as ``**model``."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def check_options() -> bool:
    """Whether --model was given.

    Raises:
        UsageError: an option was given that does not go with it, or does not go without it.
    """
    context = click.get_current_context()
    default = {click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP}
    spelled = {p.name: p.opts[-1] for p in context.command.params}
    given = [n for n in context.params if context.get_parameter_source(n) not in default]
    with_model = context.params["model"] is not None
    for name in given:
        if with_model and name == "trace":
            raise UsageError("give TRACE or --model, not both")
        if with_model and name not in _NAMES | _SHARED:
            raise UsageError(f"{spelled[name]} goes with TRACE, not with --model")
        if not with_model and name in _NAMES:
            raise UsageError(f"{spelled[name]} goes with --model")
    return with_model


def run(o: dict[str, Any]) -> int:
    """Run the model and print; returns the exit code.

    Raises:
        SimlabError: a run differs from its replay, or the reference path from the model.
    """
    import json
    from dataclasses import replace

    from simlab.capture.engine import Settings
    from simlab.capture.load import load
    from simlab.capture.prompts import demo_prompts, read_prompts
    from simlab.cli.invocation import command_line
    from simlab.cli.options import chosen_policies, numbers, parameters
    from simlab.cli.progress import token_bar
    from simlab.live.device import open_device
    from simlab.live.model_loop import ModelCell, Options, run_model
    from simlab.replay.sizes import parse_sizes
    from simlab.result.store import check_target, write_results

    cells = [
        ModelCell(policy, size, level, parameters(o["params"]))
        for level in numbers(o["concurrency"], int, "--concurrency")
        for size in parse_sizes("25%" if o["slots"] is None else o["slots"])
        for policy in chosen_policies([o["policies"]])
    ]
    settings = Settings(
        max_new_tokens=o["max_new_tokens"],
        prefill_chunk=o["ubatch"],
        seed=o["seed"],
        ignore_eos=o["ignore_eos"],
        concurrency=min(cell.concurrency for cell in cells),
    )
    options = Options(
        path=o["path"],
        on_decline=o["on_decline"],
        policy_seed=o["seed"],
        compare=not o["no_compare"],
        max_prompt_tokens=o["max_prompt_tokens"],
        save_trace=Path(o["save_trace"]) if o["save_trace"] else None,
    )
    if o["out"] is not None:
        check_target(o["out"])
    # a few of each kind: the model runs once and then once more a cell
    prompts = read_prompts(o["prompts"]) if o["prompts"] else demo_prompts()[::6]
    source = "prompts: " + (", ".join(o["prompts"]) or "the texts embedded in simlab")
    found: list[ModelRun] = []
    failure: SimlabError | None = None
    with open_device(o["device_name"]) as device, token_bar() as watch:
        # what is not compared need not fit on the device as a whole
        where = device.kind if options.compare else "cpu"
        loaded = replace(load(o["model"], device=where, dtype=o["dtype"]), device=device.kind)
        drawn = replace(settings, sampling=loaded.sampling)
        given = (loaded, prompts, device, drawn, cells, options)
        try:
            for one in run_model(*given, source=source, command=command_line(), watch=watch):
                found.append(one)
        except SimlabError as exc:
            failure = exc
            if not found:
                raise
    rows = [row for one in found for row in one.rows]
    if o["out"] is not None:
        write_results(rows, o["out"])
    if o["as_json"]:
        click.echo(json.dumps([row.to_dict() for row in rows]))
    else:
        click.echo("\n".join(_lines(found)))
        if o["out"] is not None:
            click.echo(f"\nWritten: {o['out']}")
    kept = f"{len(found)} of {len(cells)} cells are kept"
    if failure is not None:
        raise type(failure)(f"{failure} ({kept})")
    wrong = [one for one in found if one.failed]
    if wrong:
        raise SimlabError(f"{len(wrong)} of {len(found)} cells, the first: {wrong[0].failed}")
    if found[-1].partial and not found[-1].interrupted:
        raise SimlabError(f"{found[-1].partial} ({kept}, the last one with the steps it had done)")
    if found[-1].interrupted:
        click.echo(
            f"simlab: interrupted; {kept}, the last one with the steps it had done", err=True
        )
        return 130
    return 0


def _lines(found: Sequence[ModelRun]) -> list[str]:
    """Cells of a model as text."""
    from simlab.live.table import aligned, name

    first = found[0].check.measured or found[0].check.simulated
    timing = first.timing
    lines = [f"{first.model}: experts computed from a slot pool, {found[0].path} path"]
    if timing:
        where = f" ({timing['device_note']})" if timing["device_note"] else ""
        lines.append(f"MEASURED on {timing['device']}{where}, beside SIMULATED")
        lines.append(
            f"compared with the model without a pool, its experts computed by transformers'"
            f" {timing['experts_of_the_whole_model']} form, and with the replay of the captured"
            " trace"
            if timing["comparison"]
            else "compared with the replay of the captured trace, not with the model without a pool"
        )
    lines += [f"{first.semantics} semantics, on decline: {first.on_decline}", ""]
    table = [
        ["policy", "C", "slots", "pool MiB", "hit rate", "misses", "MiB/token", "= replay",
         "= model", "same text", "ms/token", "without pool"]
    ]  # fmt: skip
    for one in found:
        row = one.check.measured or one.check.simulated
        same = one.comparison
        ms = row.timing.get("baselines_ms_per_token", {})
        table.append([
            row.policy + (" *" if row.needs_engine_change else ""),
            str(row.concurrency),
            "+".join(f"{n:,}" for n in row.slots),
            "-" if not row.timing else f"{row.timing['pool_bytes'] / 2**20:.2f}",
            "-" if row.hit_rate is None else f"{100 * row.hit_rate:.2f} %",
            f"{row.counters.misses:,}",
            "-" if row.mib_per_token is None else f"{row.mib_per_token:.2f}",
            "yes" if one.check.equal else "NO",
            "-" if same is None else "every bit" if same.identical else "NO",
            "-" if same is None else "yes" if same.same_text else "NO",
            "-" if row.ms_per_token is None else f"{row.ms_per_token:.3f}",
            "".join(f"{m:.3f}" for m in ms.values()) or "-",
        ])  # fmt: skip
    lines += aligned(table)
    if any((one.check.simulated).needs_engine_change for one in found):
        lines.append("* needs an engine change: llama.cpp itself cannot decline a miss")
    for one in found:
        named = name(one.check.simulated)
        if one.partial:
            done = one.check.simulated.counters.steps
            lines.append(f"PARTIAL, {named}: {one.partial}; the {done:,} steps before it count")
        if one.comparison is not None and not one.comparison.identical:
            lines.append(
                f"DIVERGES, {named}: {one.comparison.why}; logits by at most"
                f" {one.comparison.max_abs_logits:.3g}"
            )
        if not one.check.equal:
            lines.append(f"DIFFERENT, {named}: {one.check.difference}")
    return lines
