"""``simlab calibrate``: fit the time model to measured speeds, or say what they leave open."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import click

from simlab.errors import UsageError

if TYPE_CHECKING:
    from simlab.cost.fit import Calibration

_MEANING = {
    "base_ms": "ms of a step without misses",
    "miss_ms": "ms to bring all experts of a step over the link",
}


@click.command("calibrate")
@click.argument("points")
@click.option(
    "--mib-per-token",
    type=click.FloatRange(0, min_open=True),
    metavar="N",
    help="MiB of all experts that a token picks: gives the bandwidth (see: simlab plan --napkin).",
)
@click.option("--at", metavar="RATE,...", help="Predict at these hit rates (0..1).")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON list, an object a setup.")
def command(points: str, mib_per_token: float | None, at: str | None, as_json: bool) -> None:
    """Fit the time model to measured speeds at known hit rates.

    POINTS is a CSV file with the columns tok_s, hit_rate, cache_mib, concurrency, host_share and
    model, gpu, link, setup; only tok_s is needed. Rows of one model, GPU, link and concurrency
    share parameters. From fewer than three runs with known hit rates nothing is predicted: the
    intervals that the points allow are printed instead.
    """
    import json

    from simlab.cost.fit import calibrate
    from simlab.cost.points import read_points

    rates = _rates(at)
    found = [calibrate(setup) for setup in read_points(points)]
    if as_json:
        click.echo(json.dumps([_as_dict(c, mib_per_token, rates) for c in found]))
        return
    for calibration in found:
        _print(calibration, mib_per_token, rates)


def _rates(at: str | None) -> list[float]:
    try:
        rates = [float(part) for part in at.split(",")] if at is not None else []
    except ValueError:
        rates = [-1.0]
    if not all(0 <= rate <= 1 for rate in rates):
        raise UsageError(f"--at takes hit rates of 0..1 separated by commas, not {at!r}")
    return rates


def _bandwidth(calibration: Calibration, mib: float | None) -> dict[str, float | None]:
    """GB/s of the link, if the bytes of a token are known: low, high and value."""
    if mib is None:
        return {}
    # a step of several streams looks up each distinct expert once, so its bytes are not known
    if calibration.setup.concurrency != 1:
        return {}
    miss = calibration.parameters["miss_ms"]
    size = mib * 2**20 / 1e6  # bytes a ms are 1e-6 GB/s

    def speed(ms: float | None) -> float | None:
        return size / ms if ms else None

    return {"low": speed(miss.high), "high": speed(miss.low), "value": speed(miss.value)}


def _as_dict(c: Calibration, mib: float | None, rates: list[float]) -> dict[str, Any]:
    def finite(x: float) -> float | None:
        return x if x < float("inf") else None

    setup = c.setup
    return {
        "model": setup.model,
        "gpu": setup.gpu,
        "link": setup.link,
        "concurrency": setup.concurrency,
        "kind": "fitted" if c.fitted else "feasible",
        "parameters": {
            name: {"value": p.value, "low": p.low, "high": finite(p.high)}
            for name, p in c.parameters.items()
        },
        "bandwidth_gb_s": _bandwidth(c, mib) or None,
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


def _print(c: Calibration, mib: float | None, rates: list[float]) -> None:
    click.echo(click.style(c.setup.name, bold=True))
    how = "fitted, 95 % interval" if c.fitted else "not determined, what the points allow"
    for name, interval in c.parameters.items():
        click.echo(f"  {name}  {interval!s:<28} {_MEANING[name]} ({how})")
    speed = _bandwidth(c, mib)
    if speed:
        low, high, value = (speed[key] for key in ("low", "high", "value"))
        text = f"{low or 0:.3g} .. " + ("no upper limit" if high is None else f"{high:.3g}")
        click.echo(f"  link     {f'{value:.3g} ({text})' if value else text} GB/s")
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
