"""``simlab policies``: what there is to replay."""

from __future__ import annotations

import click


@click.group("policies")
def command() -> None:
    """List the policies that come with simlab, or show one."""


@command.command("list")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list.")
def list_(as_json: bool) -> None:
    """List name, version, hash, parameters and source of every policy."""
    import json

    from simlab.policy.registry import load_policy, policy_names

    policies = [load_policy(name) for name in policy_names()]
    if as_json:
        rows = [
            {
                "name": p.name,
                "version": p.version,
                "hash": p.hash,
                "source": p.source,
                "bound": p.bound,
                "declines": p.declines,
                "params": {name: vars(param) for name, param in p.params.items()},
            }
            for p in policies
        ]
        click.echo(json.dumps(rows, default=str))
        return
    for p in policies:
        kind = " (bound)" if p.bound else " (needs an engine change)" if p.declines else ""
        params = ", ".join(f"{name}={param.default:g}" for name, param in p.params.items())
        click.echo(f"{p.label:<14} {p.hash}  {p.doc.splitlines()[0]}{kind}")
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
