"""``simlab synth``: traces that no model made, labelled synthetic wherever they go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from simlab.errors import UsageError

#: Parameters of ``ar``, as ArParams names them: type and meaning. Not given: the preset's value.
AR_OPTIONS: dict[str, tuple[type, str]] = {
    "layers": (int, "MoE layers."),
    "experts": (int, "Experts of a layer."),
    "k": (int, "Picks per token and layer."),
    "requests": (int, "Number of requests."),
    "prompt_tokens": (int, "Mean prompt length."),
    "decode_tokens": (int, "Mean number of decode tokens."),
    "length_spread": (float, "Lengths reach this share below and above the mean (0..1)."),
    "topics": (int, "Topics, 1..26; a request begins with one drawn at random."),
    "topic_switch": (float, "Probability, per token, of turning to another topic."),
    "popularity": (float, "Scale of what makes an expert popular in all topics."),
    "topic": (float, "Scale of what makes an expert popular in one topic."),
    "slow": (float, "Scale of the slow component of the logits."),
    "slow_rho": (float, "Share of the slow component that the next token keeps."),
    "fast": (float, "Scale of the fast component of the logits."),
    "fast_rho": (float, "Share of the fast component that the next token keeps."),
    "layer_spread": (float, "How unequal the layers' locality is (0..1)."),
    "seed": (int, "Seed of all random numbers."),
}


def _ar_options(function: Callable[..., None]) -> Callable[..., None]:
    for name, (kind, text) in reversed(AR_OPTIONS.items()):
        option = "--" + name.replace("_", "-")
        function = click.option(option, name, type=kind, metavar=_METAVARS[kind], help=text)(
            function
        )
    return function


_METAVARS = {int: "N", float: "X"}


@click.group()
def command() -> None:
    """Make a synthetic trace: random picks, not those of a real model."""


@command.command()
@click.option("--preset", default="qwen3-30b-a3b", show_default=True, help="Where to start from.")
@_ar_options
@click.option(
    "--expert-bytes",
    metavar="SPEC",
    help="Bytes of one expert: N, or 0-23:N,24-47:M by layer, N = A+B+C by tensor.",
)
@click.option("--out", "-o", required=True, metavar="FILE", help="The trace to write.")
def ar(preset: str, expert_bytes: str | None, out: str, **options: float | None) -> None:
    """Router logits as an autoregressive process with topics, in any shape.

    The logit of an expert is its popularity (in all topics and in the present one), plus a slow and
    a fast autoregressive component, plus noise of scale 1; the k highest are picked. What the
    preset was fitted to stands in docs/synthetic.md and in the trace's notes.
    """
    from dataclasses import replace

    from simlab.cli.progress import bar
    from simlab.trace.synth import find_preset, write_ar
    from simlab.trace.synth_ar import plan

    given: dict[str, Any] = {name: value for name, value in options.items() if value is not None}
    params = replace(find_preset(preset).params, **given)
    lengths = plan(params)
    with bar("tokens", int(lengths.prompt.sum() + lengths.decode.sum())) as advance:
        meta = write_ar(out, params, preset, expert_bytes, advance)
    click.echo(f"{out}: {meta.kind} trace, content {meta.content_hash[:16]}")


@command.command()
@click.option(
    "--stickiness", type=float, required=True, metavar="P", help="0, 0.4 and 0.7 in the article."
)
@click.option(
    "--after",
    metavar="P,P...",
    help="Stickiness of the traces drawn before from the same generator, or 'none'."
    "  [default: those of 0,0.4,0.7 that come before]",
)
@click.option(
    "--tokens", type=int, default=4000, show_default=True, metavar="N", help="Tokens of a trace."
)
@click.option("--seed", type=int, default=7, show_default=True, metavar="N", help="Generator seed.")
@click.option("--out", "-o", required=True, metavar="FILE", help="The trace to write.")
def toy(stickiness: float, after: str | None, tokens: int, seed: int, out: str) -> None:
    """The seed article's toy router, exact: one layer, 512 experts, ten picks a token.

    A draw repeats one of the previous token's experts with probability P, else it takes an expert
    by popularity. One generator makes all of the article's traces, one after the other.
    """
    from simlab.trace.synth_toy import toy_trace
    from simlab.trace.write import write_trace

    before = None
    if after is not None:
        try:
            before = [] if after == "none" else [float(value) for value in after.split(",")]
        except ValueError:
            raise UsageError(f"--after {after!r}: write numbers like 0,0.4, or 'none'") from None
    meta = write_trace(toy_trace(stickiness, tokens=tokens, seed=seed, after=before), out)
    click.echo(f"{out}: {meta.kind} trace, content {meta.content_hash[:16]}")
