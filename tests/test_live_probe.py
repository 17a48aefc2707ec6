"""The link probe: every byte compared, every rate held against the link's limit."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")

from simlab.cli import main
from simlab.cost.link import read_profile
from simlab.errors import SimlabError, UsageError
from simlab.live import link_limit as limits
from simlab.live import probe as probe_module
from simlab.live.device import Device, open_device
from simlab.live.link_limit import link_limit
from simlab.live.probe import probe

SIZES = (4096, 65536, 2**20)


def test_a_profile_of_every_case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "link.json"
    args = ["probe", "--device", "cpu", "--max-mib", "1", "--rounds", "3", "--out", str(out)]
    assert main(args) == 0
    shown = capsys.readouterr().out
    assert "(host memory copy, not PCIe)" in shown
    assert "all bytes arrived as sent" in shown
    profile = read_profile(out)
    assert profile.valid
    assert profile.note == "host memory copy, not PCIe"
    assert profile.device == "cpu"
    cases = {(p["size"], p["memory"], p["copies"] > 1, p["compute"]) for p in profile.points}
    assert len(cases) == len(profile.points) == 5 * 2 * 2 * 2
    for point in profile.points:
        assert point["rounds"] == 3
        assert 0 < point["low_gb_s"] <= point["gb_s"] <= point["high_gb_s"]
        assert point["gb_s"] == pytest.approx(point["size"] / point["us"] / 1e3, rel=1e-6)
    queued = [
        p["gb_s"]
        for p in profile.points
        if p["memory"] == "pinned" and p["copies"] > 1 and not p["compute"]
    ]
    assert profile.peak_gb_s == max(queued)
    assert profile.provenance["command"].startswith("simlab probe --device cpu")
    assert profile.provenance["versions"]["torch"]


def test_a_rate_above_the_limit_makes_the_run_invalid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "link.json"
    args = ["probe", "--device", "cpu", "--max-mib", "1", "--limit", "0.0001"]
    assert main([*args, "--json", "--out", str(out)]) == 1
    shown, err = capsys.readouterr()
    found = json.loads(shown)
    assert found["valid"] is False
    assert "GB/s over a link of 0.0 GB/s" in found["problems"][0]
    assert err.startswith("simlab: error: this run is invalid: ")
    with pytest.raises(SimlabError, match="its run was invalid"):
        read_profile(out)  # and nothing predicts from it


@pytest.mark.parametrize("lost", [0, 4095, 2**20 - 1])
def test_a_byte_that_arrives_wrong_makes_the_run_invalid(
    lost: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = probe_module._time

    def spoiled(device: Device, host: Any, target: Any, size: int, copies: int) -> float:
        seconds = real(device, host, target, size, copies)
        target[lost] ^= 1
        return seconds

    monkeypatch.setattr(probe_module, "_time", spoiled)
    with open_device("cpu") as device:
        found = probe(device, sizes=SIZES, rounds=1, compute=(False,))
    assert not found.valid
    wrong = {line.split(",")[0] for line in found.problems}
    assert all("are not those that were sent" in line for line in found.problems)
    assert len(found.problems) == {0: 12, 4095: 12}.get(lost, 6), wrong


def test_copies_that_never_happen_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        probe_module, "_time", lambda device, host, target, size, copies: 1e-9 * size
    )
    with open_device("cpu") as device:
        found = probe(device, sizes=SIZES, rounds=1, compute=(False,))
    assert len(found.problems) == len(found.points) == 12


@pytest.mark.parametrize("sizes", [(), (4,), (4097,)])
def test_sizes_that_cannot_be(sizes: tuple[int, ...]) -> None:
    with open_device("cpu") as device, pytest.raises(UsageError, match="multiples of 8"):
        probe(device, sizes=sizes)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--max-mib", "0"], "--max-mib is 1..256"),
        (["--limit", "0"], "--limit above 0"),
        (["--rounds", "0"], "--rounds must be 1 or more"),
        (["--out", "x.txt"], "name it FILE.json"),
        (["--out", "no/such/folder/x.json"], "does not exist"),
    ],
)
def test_requests_that_cannot_be(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", "--device", "cpu", *args]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def gpu(name: str, **properties: Any) -> Any:
    """What link_limit looks at of a GPU."""
    found = SimpleNamespace(**properties)
    cuda = SimpleNamespace(get_device_properties=lambda place: found)
    return SimpleNamespace(kind="cuda", name=name, place=0, torch=SimpleNamespace(cuda=cuda))


def answers(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(
        limits.subprocess, "run", lambda *args, **kwargs: SimpleNamespace(stdout=text)
    )


@pytest.mark.parametrize(
    ("text", "limit"),
    [
        ("GPU-aa, 5, 16\n", 63.008),
        ("GPU-aa, 4, 16\n", 31.504),
        ("GPU-aa, 3, 8\n", 7.88),
        ("GPU-bb, 3, 8\nGPU-aa, 4, 8\n", 15.752),
        ("GPU-bb, 3, 8\nGPU-cc, 4, 8\n", None),
        ("GPU-aa, [N/A], [N/A]\n", None),
        ("Failed to initialize NVML\n", None),
        ("", None),
    ],
)
def test_the_limit_as_the_driver_tells_it(
    text: str, limit: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers(monkeypatch, text)
    found, source = link_limit(gpu("a GPU", uuid="aa"))
    assert found == (None if limit is None else pytest.approx(limit))
    assert source.startswith("unknown" if limit is None else "PCIe")


def test_the_limit_as_the_kernel_tells_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def missing(*args: Any, **kwargs: Any) -> Any:
        raise FileNotFoundError

    monkeypatch.setattr(limits.subprocess, "run", missing)
    folder = tmp_path / "0000:c1:00.0"
    folder.mkdir()
    (folder / "max_link_speed").write_text("16.0 GT/s PCIe\n")
    (folder / "max_link_width").write_text("16\n")
    real = limits.Path
    monkeypatch.setattr(
        limits, "Path", lambda p: tmp_path if p == "/sys/bus/pci/devices" else real(p)
    )
    found, source = link_limit(gpu("a GPU", pci_domain_id=0, pci_bus_id=0xC1, pci_device_id=0))
    assert (found, source) == (pytest.approx(31.504), "PCIe 16 GT/s x16 (/sys)")
    assert link_limit(gpu("a GPU"))[0] is None


def test_a_link_that_is_not_pcie() -> None:
    assert link_limit(gpu("NVIDIA GH200 480GB"))[0] == 450.0
