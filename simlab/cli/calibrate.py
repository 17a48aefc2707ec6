"""``simlab calibrate``: fit the time model to measured speeds, or say what they leave open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.cost.fit import Calibration, Interval

_MEANING = {
    "base_ms": "ms of a step without misses",
    "miss_ms": "ms to bring all experts of a step over the link",
}


@click.command("calibrate")
@click.argument("points")
@click.option("--at", metavar="RATE,...", help="Predict at these hit rates (0..1).")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, an object a setup.")
def command(points: str, at: str | None, as_json: bool) -> None:
    """Fit the time model to measured speeds at known hit rates.

    POINTS is a CSV file with the columns tok_s, hit_rate, cache_mib, concurrency, host_share,
    mib_per_token and model, gpu, link, setup; only tok_s is needed. Rows of one model, GPU, link
    and concurrency share parameters. From fewer than three runs with known hit rates nothing is
    predicted: the intervals that the points allow are printed instead.
    """
    import json

    from simlab.cost.fit import calibrate
    from simlab.cost.points import read_points

    rates = _rates(at)
    found = [calibrate(setup) for setup in read_points(points)]
    if as_json:
        click.echo(json.dumps([_as_dict(c, rates) for c in found]))
        return
    for calibration in found:
        _print(calibration, rates)


def _rates(at: str | None) -> list[float]:
    try:
        rates = [float(part) for part in at.split(",")] if at is not None else []
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(f"--at takes hit rates of 0..1 separated by commas, not {at!r}")
    return rates


def _as_dict(c: Calibration, rates: list[float]) -> dict[str, Any]:
    def interval(p: Interval | None) -> dict[str, float | None] | None:
        if p is None:
            return None
        return {"value": p.value, "low": p.low, "high": p.high if p.high < float("inf") else None}

    setup = c.setup
    return {
        "model": setup.model,
        "gpu": setup.gpu,
        "link": setup.link,
        "concurrency": setup.concurrency,
        "kind": "fitted" if c.fitted else "feasible",
        "parameters": {name: interval(p) for name, p in c.parameters.items()},
        "bandwidth_gb_s": interval(c.bandwidth_gb_s),
        "residuals": [
            {
                "row": r.point.row,
                "label": r.point.label,
                "hit_rate": r.point.hit_rate,
                "measured_ms": r.point.step_ms,
                "predicted_ms": r.predicted_ms,
                "error": r.error,
            }
            for r in c.residuals
        ],
        "break_even": [{"row": p.row, "label": p.label, "hit_rate": h} for p, h in c.break_even],
        "predicted": [
            {"hit_rate": rate, "predicted_ms": c.predict_ms(rate)} for rate in rates if c.fitted
        ],
        "undetermined": list(c.undetermined),
    }


def _print(c: Calibration, rates: list[float]) -> None:
    click.echo(click.style(c.setup.name, bold=True))
    how = "fitted, 95 % interval" if c.fitted else "not determined, what the points allow"
    for name, interval in c.parameters.items():
        click.echo(f"  {name}  {interval!s:<28} {_MEANING[name]} ({how})")
    if c.bandwidth_gb_s is not None:
        click.echo(f"  link     {c.bandwidth_gb_s!s:<28} GB/s that miss_ms implies")
    for r in c.residuals:
        click.echo(
            f"    {r.point.label:<26} {r.point.hit_rate or 0:6.1%} hits  measured"
            f" {r.point.step_ms:7.2f} ms  predicted {r.predicted_ms:7.2f} ms  {r.error:+.1%}"
        )
    for point, rate in c.break_even:
        against = f"{point.label} ({point.tok_s:g} tok/s measured)"
        if rate > 1:
            click.echo(f"  break-even: none, {against} is faster even without misses")
        else:
            click.echo(f"  break-even: the cache beats {against} above {max(rate, 0):.1%} hits")
    for rate in rates if c.fitted else []:
        ms = c.predict_ms(rate)
        lanes = c.setup.concurrency
        click.echo(f"  at {rate:.1%} hits: predicted {ms:.2f} ms, {1000 * lanes / ms:.1f} tok/s")
    if rates and not c.fitted:
        click.echo("  no prediction: the parameters are not determined")
    for text in c.undetermined:
        click.echo(f"  open: {text}")
    click.echo()
