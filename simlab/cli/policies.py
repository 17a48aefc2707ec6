"""``simlab policies``: what there is to replay, and making more."""

from __future__ import annotations

from pathlib import Path

import click

from simlab.errors import UsageError


@click.group("policies")
def command() -> None:
    """List and show policies, start a new one, check one."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(as_json: bool) -> None:
    """List name, version, hash, parameters and source of every policy."""
    import json

    from simlab.policy.registry import load_policies, outside_policies, policy_names

    policies = load_policies([*policy_names(), *outside_policies()])
    if as_json:
        rows = [
            {
                "name": p.name,
                "version": p.version,
                "hash": p.hash,
                "source": p.source,
                "bound": p.bound,
                "declines": p.declines,
                "needs": list(p.needs),
                "params": {name: vars(param) for name, param in p.params.items()},
            }
            for p in policies
        ]
        click.echo(json.dumps(rows, default=str))
        return
    for p in policies:
        kind = " (bound)" if p.bound else " (needs an engine change)" if p.declines else ""
        kind += " (needs router weights)" if p.reads_weights else ""
        params = ", ".join(f"{name}={param.default:g}" for name, param in p.params.items())
        click.echo(f"{p.label:<14} {p.hash}  {p.summary}{kind}")
        click.echo(f"{'':<14} {p.source}" + (f"; parameters: {params}" if params else ""))


@command.command("show")
@click.argument("policy")
def show(policy: str) -> None:
    """Show what a policy does, its source and its parameters."""
    from simlab.policy.registry import load_policy

    p = load_policy(policy)
    click.echo(f"{p.label}  hash {p.hash}\n{p.path}\n\n{p.doc}\n\nSource: {p.source}")
    for name, param in p.params.items():
        click.echo(
            f"--param {name}={param.default:g}  ({param.low:g}..{param.high:g})  {param.doc}"
        )


@command.command("new")
@click.argument("name")
def new(name: str) -> None:
    """Write NAME.py here: a commented policy that works, to be changed."""
    import re

    from simlab.resources import folder
    from simlab.whole_file import write_atomically

    path = Path(name.removesuffix(".py") + ".py")
    own = path.stem.lower().replace("_", "-")
    if path.name != name.removesuffix(".py") + ".py" or not re.fullmatch(
        r"[a-z0-9][a-z0-9._-]*", own
    ):
        raise UsageError(f"a policy's name is letters, digits and -._, not {name!r}")
    if path.exists():
        raise UsageError(f"{path} exists; give another name")
    text = (folder("policies") / "_template.py").read_text(encoding="utf-8")
    text = text.replace('"""NAME:', f'"""{own}:').replace('"template"', f'"{own}"')
    write_atomically(path, text.replace("template@1", f"{own}@1").encode())
    click.echo(
        f"Written: {path}\nCheck it: simlab policies check {path}\n"
        f"Replay it: simlab replay --policy lru,./{path},opt"
    )


@command.command("check")
@click.argument("file")
@click.option(
    "--seconds", default=120, show_default=True, help="Most processor time for each stage."
)
@click.option("--memory", default=4096, show_default=True, help="Most memory for it, in MiB.")
def check(file: str, seconds: int, memory: int) -> None:
    """Check a policy: bounds, invariants, compiled = interpreted, speed.

    Replays random and hostile traces, each stage in a process of its own.
    """
    from simlab.analysis.policy_check import check_policy
    from simlab.policy.registry import load_policy, policy_names

    if not (0 < seconds < 1e6 and 0 < memory < 1e7):
        raise UsageError("--seconds and --memory must be above 0")
    path = file if file in policy_names() else str(_file(file))
    for passed in check_policy(path, seconds=seconds, mib=memory):
        click.echo(f"ok  {passed.shown}")
    speed, lru = passed.lookups_per_second, passed.lru_lookups_per_second
    label = load_policy(path).label
    click.echo(f"{label}: {speed / 1e6:.1f} M lookups/s, {speed / lru:.2f} x LRU ({lru / 1e6:.1f})")


def _file(text: str) -> Path:
    if not Path(text).is_file():
        raise UsageError(f"no policy file {text}")
    return Path(text)
