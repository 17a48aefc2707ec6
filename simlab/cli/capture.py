"""``simlab capture``: run a model over prompts and write what its routers picked."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click


@click.command("capture")
@click.option(
    "--model",
    default="demo",
    show_default=True,
    metavar="DIR|ID",
    help="A model's folder, a Hugging Face id, or demo: the tiny model that comes with simlab.",
)
@click.option(
    "--prompts",
    multiple=True,
    metavar="FILE|DIR",
    help="Text (a file is a prompt), JSONL (prompt or messages, tag), or folders; may be repeated."
    "  [default: embedded texts]",
)
@click.option("--out", "-o", default="capture.parquet", show_default=True, metavar="FILE")
@click.option("--tag", default="", help="Tag of prompts that have none (prose, code, chat...).")
@click.option("--max-prompt-tokens", type=click.IntRange(1), metavar="N", help="Cut prompts.")
@click.option("--max-new-tokens", type=int, default=128, show_default=True, metavar="N")
@click.option("--ignore-eos", is_flag=True, help="Generate on after an end-of-text token.")
@click.option(
    "--batch", default=1, show_default=True, metavar="N", help="Prompts started together, padded."
)
@click.option(
    "--concurrency",
    type=int,
    metavar="C",
    help="Continuous batching: so many lanes, each takes the next prompt when its own has ended."
    "  [default: 1; of the demo model 8]",
)
@click.option(
    "--prefill-chunk", default=512, show_default=True, metavar="N", help="Prompt tokens a step."
)
@click.option(
    "--teacher-forced", is_flag=True, help="Picks over the texts themselves; generate nothing."
)
@click.option(
    "--phase",
    type=click.Choice(["decode", "prefill"]),
    default="decode",
    show_default=True,
    help="What rows of --teacher-forced are marked as.",
)
@click.option("--temperature", type=float, metavar="T", help="0: greedy.  [default: the model's]")
@click.option(
    "--top-k", type=int, metavar="K", help="Only the K likeliest.  [default: the model's]"
)
@click.option("--top-p", type=float, metavar="P", help="Nucleus sampling.  [default: the model's]")
@click.option("--seed", default=0, show_default=True, help="Of what is drawn, with the request.")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or cuda.")
@click.option("--dtype", default="auto", show_default=True, help="float32, bfloat16, float16...")
@click.option("--weights", is_flag=True, help="Write the router weights too.")
@click.option("--hook", metavar="PATTERN:ARG", help="Where the experts of an unknown model are.")
@click.option("--download", is_flag=True, help="Get the model from the Hugging Face hub.")
@click.option("--resume", is_flag=True, help="Go on with a capture to the same file.")
@click.option("--force", is_flag=True, help="Replace the file if it is there.")
@click.option("--json", "as_json", is_flag=True, help="Print the figures as JSON.")
def command(**o: Any) -> None:
    """Run a model over prompts and write what its routers picked.

    Without arguments the tiny demo model continues embedded texts: a minute or so. Ctrl-C ends a
    capture early with a valid trace, marked partial; --resume goes on with it, or with one that was
    killed.
    """
    import json
    from dataclasses import replace

    from simlab.capture.engine import Settings
    from simlab.capture.load import DEMO, DEMO_LANES, load
    from simlab.capture.prompts import demo_prompts, read_prompts
    from simlab.capture.resume import check_target
    from simlab.capture.run import capture
    from simlab.cli.invocation import command_line
    from simlab.cli.progress import token_bar
    from simlab.trace.schema import DECODE, PREFILL

    if o["concurrency"] is None:
        together = o["model"] == DEMO and o["batch"] == 1 and not o["teacher_forced"]
        o["concurrency"] = DEMO_LANES if together else 1
    names = ("max_new_tokens", "batch", "concurrency", "prefill_chunk", "teacher_forced", "seed")
    settings = Settings(
        **{name: o[name] for name in names},
        forced_phase=DECODE if o["phase"] == "decode" else PREFILL,
        ignore_eos=o["ignore_eos"],
    )
    check_target(Path(o["out"]), resume=o["resume"], force=o["force"])
    source = "prompts: " + (", ".join(o["prompts"]) or "the texts embedded in simlab")
    if o["prompts"]:
        prompts = read_prompts(o["prompts"], tag=o["tag"])
    else:
        prompts = demo_prompts(whole=settings.teacher_forced)
    where = {name: o[name] for name in ("device", "dtype", "download", "hook")}
    loaded = load(o["model"], **where)
    own = {name: o[name] for name in ("temperature", "top_k", "top_p") if o[name] is not None}
    settings = replace(settings, sampling=replace(loaded.sampling, **own))
    with token_bar() as watch:
        done = capture(
            loaded,
            prompts,
            o["out"],
            settings,
            **{
                name: o[name]
                for name in ("weights", "hook", "max_prompt_tokens", "resume", "force")
            },
            source=source,
            command=command_line(),
            watch=watch,
        )
    click.echo(json.dumps(done.to_dict(), indent=2) if o["as_json"] else str(done))
    if done.meta.partial:
        click.echo("simlab: interrupted; the trace is marked partial (--resume goes on)", err=True)
        click.get_current_context().exit(130)
