"""What is shipped: the wheel works away from the checkout, an editable install sees every edit."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from simlab import resources
from simlab.errors import SimlabError
from simlab.policy.registry import load_policy


def run(*command: str | Path, cwd: Path) -> str:
    env = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run([*map(str, command)], cwd=cwd, env=env, capture_output=True, text=True)
    assert done.returncode == 0, f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


def new_environment(folder: Path, *install: str | Path) -> Path:
    """A venv in ``folder`` with simlab installed; its dependencies are those of this environment.

    Returns its bin folder. Nothing is downloaded: a .pth file lends this environment's packages.
    """
    run(sys.executable, "-m", "venv", "--without-pip", folder, cwd=folder.parent)
    python = folder / "bin" / "python"
    lent = "\n".join(sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))
    own = Path(
        run(python, "-c", "import sysconfig as s; print(s.get_path('purelib'))", cwd=folder).strip()
    )
    # named to come after simlab's own; lent for the build backend of an editable install
    (own / "zz-lent.pth").write_text(lent)
    pip = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "-q",
        "--no-deps",
        "--no-index",
    ]
    run(*pip, "--force-reinstall", "--no-build-isolation", *install, cwd=folder)
    return folder / "bin"


def replay_lru(bin_: Path, cwd: Path) -> dict[str, Any]:
    out = run(bin_ / "simlab", "replay", "--policy", "lru", "--slots", "1834", "--json", cwd=cwd)
    rows = json.loads(out)
    assert len(rows) == 1
    return rows[0]


@pytest.fixture(scope="module")
def wheel(repo: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel as a user gets it: built from the source distribution."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, repo, cwd=out)
    (path,) = out.glob("simlab-*.whl")
    return path


def test_the_wheel_carries_data_and_no_tests(wheel: Path, repo: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    for data in ("policies", "traces", "experiments"):
        files = {p.relative_to(repo).as_posix() for p in (repo / data).rglob("*") if p.is_file()}
        shipped = {f for f in files if "__pycache__" not in f}
        assert shipped
        assert {f"simlab/_bundled/{f}" for f in shipped} <= names
    tops = {name.split("/")[0] for name in names}
    assert len(tops) == 2  # simlab and its metadata
    assert not [n for n in names if re.search(r"reports|tests|__pycache__|\.nb[ci]$", n)]
    assert any(n.endswith("licenses/LICENSE") for n in names)
    assert wheel.stat().st_size < 20e6


def test_the_wheel_replays_away_from_the_checkout(wheel: Path, tmp_path: Path) -> None:
    bin_ = new_environment(tmp_path / "env", wheel)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    out = run(bin_ / "simlab", "inspect", "tiny-demo-model", "--json", cwd=elsewhere)
    assert json.loads(out)["model"] == "tiny demo model"
    row = replay_lru(bin_, elsewhere)
    assert (row["policy"], row["slots_json"], row["synthetic"]) == ("lru", [1834, 1834], True)
    assert row["hits"] > 0
    # the same policy has the same name wherever it is installed
    assert row["policy_hash"] == load_policy("lru").hash
    where = "from simlab import resources as r; print(r.folder('policies'))"
    policies = Path(run(bin_ / "python", "-c", where, cwd=elsewhere).strip())
    assert policies.parts[-3:] == ("simlab", "_bundled", "policies")
    assert policies.is_relative_to(tmp_path / "env")
    assert not list(elsewhere.iterdir())


def test_an_editable_install_sees_an_edited_policy(repo: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "check out"  # a space, as in many people's folders
    checkout.mkdir()
    for name in ("simlab", "policies", "traces", "experiments"):
        ignore = shutil.ignore_patterns("__pycache__")
        shutil.copytree(repo / name, checkout / name, ignore=ignore)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(repo / name, checkout)
    bin_ = new_environment(tmp_path / "env", "--editable", checkout)
    before = replay_lru(bin_, tmp_path)
    policy = checkout / "policies" / "lru.py"
    text = policy.read_text()
    least_recent = "    return after(state.recency, group.keys)\n"
    most_recent = (
        "    out = before(state.recency, group.keys)\n"
        "    while cache.stamp[out] == cache.now[0]:  # a member of the present set may not leave\n"
        "        out = before(state.recency, out)\n"
        "    return out\n"
    )
    edited = text.replace(least_recent, most_recent).replace(
        "import Lists, after,", "import Lists, before,"
    )
    assert edited != text
    policy.write_text(edited)
    after = replay_lru(bin_, tmp_path)
    assert before["lookups"] == after["lookups"]
    assert before["policy_hash"] != after["policy_hash"]
    assert before["misses"] < after["misses"]
    policy.write_text(text)
    assert replay_lru(bin_, tmp_path)["misses"] == before["misses"]


def test_constraints_pin_every_dependency(repo: Path) -> None:
    project = tomllib.loads((repo / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"].values()
    wanted = [*project["dependencies"], *(w for extra in extras for w in extra)]
    lines = (repo / "constraints.txt").read_text().splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[A-Za-z0-9.]+", pin) for pin in pins)
    pinned = {pin.split("==")[0].lower() for pin in pins}
    assert {re.match(r"[A-Za-z0-9._-]+", w)[0].lower() for w in wanted} <= pinned


def test_samples_go_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    sample = resources.folder("traces") / resources.CAPTURED_TRACE
    assert resources.find_trace(None) == resources.default_trace() != sample
    assert resources.find_trace("tiny-demo-model") == sample
    for path in ("tiny-demo-model.parquet", "./sub/tiny-demo-model", "nonesuch", "x\0y", "n" * 300):
        assert resources.find_trace(path) == Path(path)
    (tmp_path / "tiny-demo-model").touch()  # a file of that name is meant
    assert resources.find_trace("tiny-demo-model") == Path("tiny-demo-model")


def test_resources_name_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resources.folder("policies") == resources.root() / "policies"
    monkeypatch.setattr(resources, "root", lambda: tmp_path)
    with pytest.raises(SimlabError, match=r"'traces' is missing at .*reinstall"):
        resources.default_trace()
    (tmp_path / "traces").mkdir()
    with pytest.raises(SimlabError, match="name a trace, or reinstall"):
        resources.default_trace()
