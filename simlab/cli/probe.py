"""``simlab probe``: what the link between host memory and the device can do."""

from __future__ import annotations

import click

from simlab.errors import SimlabError, UsageError


@click.command("probe")
@click.option(
    "--device",
    "device_name",
    default="cuda",
    show_default=True,
    metavar="NAME",
    help="cuda, cuda:N, or cpu: ordinary memory in place of a GPU, not PCIe.",
)
@click.option("--out", metavar="FILE.json", help="Write the link profile, for simlab live --link.")
@click.option("--rounds", default=5, show_default=True, help="Times each case is measured.")
@click.option("--max-mib", type=int, default=256, show_default=True, help="Largest copy.")
@click.option(
    "--limit",
    type=float,
    metavar="GB/S",
    help="What the link can carry at most.  [default: asked of the system]",
)
@click.option("--json", "as_json", is_flag=True, help="Print the profile as JSON.")
def command(
    device_name: str,
    out: str | None,
    rounds: int,
    max_mib: int,
    limit: float | None,
    as_json: bool,
) -> None:
    """Measure the link to the device: bandwidth and latency by copy size.

    Copies of 4 KiB to 256 MiB go from pinned and from pageable memory, alone and many in a row,
    with and without compute beside them. All bytes that arrive are compared with those sent; a
    rate above what the link can carry makes the run invalid (exit code 1).
    """
    import json
    import time
    from dataclasses import replace
    from pathlib import Path

    from simlab.cli.invocation import command_line
    from simlab.cli.progress import bar
    from simlab.cost.link import write_profile
    from simlab.live.device import MIB, open_device
    from simlab.live.probe import SIZES, n_cases, probe
    from simlab.live.provenance import provenance
    from simlab.live.table import profile_lines
    from simlab.whole_file import check_place

    if out is not None:
        if Path(out).suffix.lower() != ".json":
            raise UsageError(f"{out}: a link profile is a JSON file; name it FILE.json")
        check_place(Path(out))
    if not 1 <= max_mib <= SIZES[-1] // MIB or (limit is not None and not limit > 0):
        raise UsageError(f"--max-mib is 1..{SIZES[-1] // MIB} and --limit above 0")
    sizes = tuple(size for size in SIZES if size <= max_mib * MIB)
    started = time.time()
    with open_device(device_name) as device:
        with bar("Probing", n_cases(sizes)) as advance:
            found = probe(device, sizes=sizes, rounds=rounds, limit_gb_s=limit, progress=advance)
        found = replace(found, provenance=provenance(device, command_line(), started))
    if out is not None:
        write_profile(found, out)
    if as_json:
        click.echo(json.dumps(found.to_dict()))
    else:
        click.echo("\n".join(profile_lines(found)))
        if out is not None:
            click.echo(f"\nWritten: {out}")
    if not found.valid:
        raise SimlabError(f"this run is invalid: {'; '.join(found.problems)}")
