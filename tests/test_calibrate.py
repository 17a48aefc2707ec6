"""The time model against published speeds, and what it refuses to say."""

from __future__ import annotations

import csv
import json
import math
from pathlib import Path

import pytest

from simlab.cli import main
from simlab.cost.fit import TOLERANCE, Calibration, calibrate, whole_layers_ms
from simlab.cost.points import Setup, read_points
from simlab.errors import SimlabError, UsageError

#: MiB of all experts of a token: article 000 (napkin), and 8 x 24 experts of 2.53 and 2.92 MiB each
#: (article 002: gate and up in Q4_K, down in Q4_K or Q6_K).
MIB_PER_TOKEN = {"Qwen3.8-Flash-Next Q4_0": 1265.625, "Qwen3-30B-A3B Q4_K_M": 1046.25}


def write(path: Path, *rows: dict[str, object]) -> Path:
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
    return path


def made(base: float, miss: float, rates: list[float], **more: object) -> list[dict[str, object]]:
    """Points that lie on the model exactly."""
    return [
        {"tok_s": 1000 / (base + (1 - rate) * miss), "hit_rate": rate, "cache_mib": 1, **more}
        for rate in rates
    ]


@pytest.fixture
def published(shared: Path, tmp_path: Path) -> dict[tuple[str, int], Calibration]:
    """The points of both articles and of the R9700 notes, with the bytes of a token where known."""
    with open(shared / "golden" / "throughput.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        row["mib_per_token"] = str(MIB_PER_TOKEN.get(row["model"], ""))
    setups = read_points(write(tmp_path / "points.csv", *rows))
    return {(s.gpu, s.concurrency): calibrate(s) for s in setups}


def test_parameters_come_back(tmp_path: Path) -> None:
    rows = made(20.0, 150.0, [0.2, 0.5, 0.6, 0.9], link="PCIe 4.0 x16", mib_per_token=1200)
    (setup,) = read_points(write(tmp_path / "p.csv", *rows))
    found = calibrate(setup)
    assert found.fitted
    assert found.parameters["base_ms"].value == pytest.approx(20.0)
    assert found.parameters["miss_ms"].value == pytest.approx(150.0)
    assert found.predict_ms(0.75) == pytest.approx(57.5)
    assert found.bandwidth_gb_s is not None
    assert found.bandwidth_gb_s.value == pytest.approx(1200 * 2**20 / 0.150 / 1e9)
    assert all(abs(r.error) < 1e-9 for r in found.residuals)


def test_an_interval_holds_the_truth(tmp_path: Path) -> None:
    rows = made(20.0, 150.0, [0.2, 0.4, 0.5, 0.6, 0.9])
    for row, noise in zip(rows, (1.01, 0.99, 1.02, 0.98, 1.0), strict=True):
        row["tok_s"] = float(str(row["tok_s"])) * noise
    (setup,) = read_points(write(tmp_path / "p.csv", *rows))
    for name, truth in (("base_ms", 20.0), ("miss_ms", 150.0)):
        interval = calibrate(setup).parameters[name]
        assert interval.low < truth < interval.high
        assert interval.high - interval.low < 0.5 * truth


def test_the_r9700_rows(published: dict[tuple[str, int], Calibration]) -> None:
    found = published["Radeon R9700", 1]
    assert found.fitted and len(found.residuals) == 5
    assert max(abs(r.error) for r in found.residuals) < 0.03
    ((point, rate),) = found.break_even
    assert point.tok_s == 18.4 and 0.80 < rate < 0.84


def test_whole_layers_against_a_cache_of_the_same_memory(
    published: dict[tuple[str, int], Calibration],
) -> None:
    """golden/README.md: at 24.0 GB whole layers 19.1-20.1 tok/s (cache: 16.7 at 24.2 GB), at 28.9
    GB 21.0 (cache: 22.15 at 28.3 GB). 41 host layers of 48,000 MiB; the cache sizes and totals say
    that everything else takes 15.4 GB."""
    found = published["Radeon R9700", 1]
    ((without, _),) = found.break_even
    base = found.parameters["base_ms"].value
    assert base is not None

    def speed(memory_gb: float) -> float:
        layers = int((memory_gb - 15.4) * 1e9 / (48_000 * 2**20 / 41))
        return 1000 / whole_layers_ms(without.step_ms, base, layers / 41)

    cache = {r.point.label: 1000 / r.predicted_ms for r in found.residuals}
    assert 18.5 < speed(24.0) < 20.7
    assert 20.2 < speed(28.9) < 21.8
    assert speed(24.0) > cache["cache, 8192 MiB"] + 1
    assert speed(28.3) < cache["cache, 12288 MiB"]


def test_what_the_other_machines_leave_open(
    published: dict[tuple[str, int], Calibration],
) -> None:
    for key in (("RTX 4090", 1), ("RTX 5090", 1), ("Tesla T4", 1), ("Tesla T4", 4)):
        found = published[key]
        assert not found.fitted and not found.residuals
        assert any("at least 3 are needed" in text for text in found.undetermined)
        with pytest.raises(UsageError, match="no prediction"):
            found.predict_ms(0.8)
        for interval in found.parameters.values():
            assert interval.value is None and interval.low < interval.high
    # 1266 MiB over PCIe 4.0 x16 take 42.1 ms at least (article 000)
    for gpu in ("RTX 4090", "RTX 5090"):
        assert published[gpu, 1].parameters["miss_ms"].low == pytest.approx(42.1, abs=0.05)
    # with 50 MiB nearly all misses: 263 ms a token are more than the link's specified speed needs
    t4 = published["Tesla T4", 1]
    assert t4.parameters["miss_ms"].low > 200 > t4.setup.least_miss_ms > 0
    assert t4.parameters["miss_ms"].high < 1000


def test_edges_of_the_intervals_agree_with_the_points(tmp_path: Path) -> None:
    rows = [*made(20.0, 100.0, [0.5, 0.8]), {"tok_s": 10, "setup": "cache", "cache_mib": 50}]
    (setup,) = read_points(write(tmp_path / "p.csv", *rows))
    base, miss = (calibrate(setup).parameters[name] for name in ("base_ms", "miss_ms"))
    assert base.low < 20 < base.high and miss.low < 100 < miss.high
    grid = [(b / 4, m) for b in range(200) for m in range(300)]
    inside = [
        (b, m)
        for b, m in grid
        if abs(b + 0.5 * m - 70) <= 70 * TOLERANCE
        and abs(b + 0.2 * m - 40) <= 40 * TOLERANCE
        and b <= 100 * (1 + TOLERANCE)
        and b + m >= 100 * (1 - TOLERANCE)
    ]
    assert min(b for b, _ in inside) == pytest.approx(base.low, abs=0.6)
    assert max(b for b, _ in inside) == pytest.approx(base.high, abs=0.6)
    assert min(m for _, m in inside) == pytest.approx(miss.low, abs=2)
    assert max(m for _, m in inside) == pytest.approx(miss.high, abs=2)


def test_points_that_contradict_each_other(tmp_path: Path) -> None:
    rows = [{"tok_s": 10, "hit_rate": 0.9}, {"tok_s": 20, "hit_rate": 0.1}]
    (setup,) = read_points(write(tmp_path / "p.csv", *rows))
    with pytest.raises(SimlabError, match="no parameters agree"):
        calibrate(setup)


def test_points_of_one_hit_rate_determine_nothing(tmp_path: Path) -> None:
    (setup,) = read_points(write(tmp_path / "p.csv", *made(20.0, 100.0, [0.5, 0.5, 0.5, 0.5])))
    found = calibrate(setup)
    assert not found.fitted
    assert found.parameters["base_ms"].low == 0
    assert math.isfinite(found.parameters["miss_ms"].high)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [*made(20.0, 100.0, [0.2, 0.5, 0.8], gpu="A"), {"tok_s": 20, "gpu": "A", "setup": "cpu"}]
    path = str(write(tmp_path / "p.csv", *rows, {"tok_s": 5, "gpu": "B", "hit_rate": 0.5}))
    assert main(["calibrate", path, "--at", "0.9,1", "--json"]) == 0
    first, second = json.loads(capsys.readouterr().out)
    assert (first["kind"], second["kind"]) == ("fitted", "feasible")
    assert [round(p["predicted_ms"], 6) for p in first["predicted"]] == [30.0, 20.0]
    assert first["break_even"][0]["hit_rate"] == pytest.approx(0.7)
    assert second["predicted"] == [] and second["residuals"] == []
    assert main(["calibrate", path, "--at", "0.9"]) == 0
    out = capsys.readouterr().out
    assert "beats cpu (20 tok/s measured) above 70.0% hits" in out
    assert "at 90.0% hits: predicted 30.00 ms, 33.3 tok/s" in out
    assert "no prediction: the parameters are not determined" in out


@pytest.mark.parametrize(
    ("text", "message", "code"),
    [
        ("", "no column tok_s", 2),
        ("tok_s\n", "holds no point", 2),
        ("hit_rate\n0.5\n", "no column tok_s", 2),
        ("tok_s,hit_rate\nfast,0.5\n", "line 2: tok_s must be", 2),
        ("tok_s,hit_rate\n0,0.5\n", "line 2: tok_s must be", 2),
        ("tok_s,hit_rate\n,0.5\n", "line 2: tok_s is empty", 2),
        ("tok_s,hit_rate\n5,77\n", "line 2: hit_rate must be 0..1", 2),
        ("tok_s,hit_rate\n5,nan\n", "line 2: hit_rate must be 0..1", 2),
        ("tok_s,concurrency\n5,1.5\n", "whole number", 2),
        ("tok_s\n\xff\n", "not a CSV file", 1),
    ],
)
def test_bad_files_are_one_line(
    tmp_path: Path, text: str, message: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "p.csv"
    path.write_bytes(text.encode("latin-1"))
    assert main(["calibrate", str(path)]) == code
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and message in err


def test_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["calibrate", str(tmp_path / "absent.csv")]) == 1
    path = str(write(tmp_path / "p.csv", {"tok_s": 5}))
    for at in ("x", "85", "-0.1", ""):
        assert main(["calibrate", path, "--at", at]) == 2
    assert "--at takes hit rates of 0..1" in capsys.readouterr().err


def test_setup_without_a_cache_is_left_open(tmp_path: Path) -> None:
    (setup,) = read_points(write(tmp_path / "p.csv", {"tok_s": 5}))
    assert isinstance(setup, Setup)
    found = calibrate(setup)
    assert not found.fitted and math.isinf(found.parameters["miss_ms"].high)
