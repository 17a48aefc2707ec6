"""Experiment files: what is chosen on one half of a trace's requests, reported on the other.

    python scripts/real_traces.py experiments/*.toml [--only ROW ...] [--again] [--out FOLDER]
    python scripts/real_traces.py experiments/*.toml --tables

Writes NAME.csv for NAME.toml: a line for each row of the experiment at each size and number of
streams. `--only` runs a row (several: once each) and keeps the other lines of the file. `--again`
chooses nothing: it replays on the second half what the file says was chosen, where a policy's code
has changed and its decisions have not. `--tables` runs nothing: it prints docs/findings-tables.md
from the files that are there.
"""

from __future__ import annotations

import argparse
import csv
import io
import itertools
import shlex
import sys
import time
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from real_traces_tables import HEADING, summary_of, tables_of

from simlab import __version__
from simlab.analysis.bootstrap import Draws, Interval
from simlab.analysis.measure import tables, tables_and_rows
from simlab.analysis.metrics import figure_of, hit_rate, mib_per_token, of_policies
from simlab.analysis.split import split_trace
from simlab.analysis.tune import surely_above
from simlab.cli.options import policy_with_parameters
from simlab.errors import SimlabError, UsageError
from simlab.replay.by_request import RequestTable, by_request
from simlab.replay.cell import Cell, Outcomes
from simlab.replay.grid import cells_for
from simlab.replay.kernel import DECLINED, HIT, LARGE_HIT, LARGE_STREAMED
from simlab.replay.pins import lookups_of
from simlab.replay.run import Replayer
from simlab.replay.sizes import parse_sizes
from simlab.resources import find_trace, root
from simlab.trace.hash import content_hash
from simlab.trace.importers import import_trace
from simlab.trace.importers.options import ImportOptions
from simlab.trace.read import read_trace
from simlab.trace.schema import Trace
from simlab.whole_file import write_atomically

#: A row that no policy file holds: the keys most looked up in the tuned half, always resident.
PIN = "static-pin"
REFERENCES = ("lru", "opt")
#: Columns of the CSV; those with an interval have _low and _high beside them.
INTERVALS = ("hit_rate", "above_lru", "gap_closed", "mib_per_token", "bytes_lru_over")


@dataclass(frozen=True)
class Row:
    """A row of an experiment: candidates, of which the best on the tuned half is reported.

    Attributes:
        name: in the tables. candidates: policies with parameters, each as ``name:param=value``.
        choose: "hits", or "bytes": fewest bytes among those that surely keep LRU's hits.
    """

    name: str
    candidates: tuple[str, ...]
    choose: str = "hits"


@dataclass(frozen=True)
class Experiment:
    """An experiment file."""

    path: Path
    trace: str
    imported: Mapping[str, Any]
    run: Mapping[str, Any]
    rows: tuple[Row, ...]


def read_experiment(path: Path) -> Experiment:
    """Read a TOML file; see experiments/README.md.

    Raises:
        UsageError: it is not there, or not of that form.
    """
    try:
        told = tomllib.loads(path.read_text(encoding="utf-8"))
        rows = tuple(
            Row(row["name"], tuple(_candidates(row)), row.get("choose", "hits"))
            for row in told["row"]
        )
        return Experiment(path, told["trace"], told.get("import", {}), told["run"], rows)
    except KeyError as exc:
        raise UsageError(f"{path}: {exc} is missing; experiments/README.md has the form") from None
    except (OSError, ValueError) as exc:
        raise UsageError(f"{path} cannot be read as an experiment: {exc}") from None


def _candidates(row: Mapping[str, Any]) -> list[str]:
    """Every policy of the row with every combination of the values its grid lists."""
    found = []
    for name in row["policies"]:
        grid = row.get("grid", {}).get(name, {})
        for values in itertools.product(*grid.values()):
            given = ",".join(f"{p}={v}" for p, v in zip(grid, values, strict=True))
            found.append(f"{name}:{given}" if given else name)
    return found


def read_picks(experiment: Experiment) -> Trace:
    """The trace of an experiment, imported where it is no trace of simlab yet.

    Raises:
        UsageError: it is missing.
    """
    path = root() / experiment.trace
    if not path.is_file() and "/" in experiment.trace:
        raise UsageError(
            f"{experiment.path.name}: {experiment.trace} is missing beside the checkout"
        )
    if not experiment.imported:
        return read_trace(str(path if path.is_file() else find_trace(experiment.trace)))
    return import_trace("parquet", path, ImportOptions(**experiment.imported))


class Halves:
    """The two halves of a trace, replayed under the same options."""

    def __init__(self, trace: Trace, run: Mapping[str, Any], jobs: int) -> None:
        self.seed, self.resamples = int(run.get("seed", 0)), int(run.get("resamples", 10_000))
        self.jobs = jobs
        parts = split_trace(trace, run.get("split", "first-half"), self.seed)
        self.trace_hash = content_hash(trace)
        self.tuning, self.held_out = (
            Replayer(
                part,
                on_decline=run.get("on_decline", "cpu"),
                prefill=run.get("prefill", "engine"),
                seed=self.seed,
            )
            for part in (parts.tuning, parts.held_out)
        )
        self.choose_tokens: int | None = run.get("choose_tokens")
        self._choosing: dict[int, Replayer] = {}

    def cell(self, spec: str, size: str, lanes: int) -> Cell:
        """One candidate in one cell."""
        policy, params = policy_with_parameters(spec)
        sizes = parse_sizes(size)
        return cells_for(self.tuning, [policy], sizes=sizes, concurrency=[lanes], params=params)[0]

    def choosing(self, lanes: int) -> Replayer:
        """The part of the tuned half that candidates are compared on."""
        if self.choose_tokens is None:
            return self.tuning
        if lanes not in self._choosing:
            steps = max(1, self.choose_tokens // lanes)
            self._choosing = {lanes: self.tuning.first_steps(steps)}
        return self._choosing[lanes]

    def choose(self, row: Row, size: str, lanes: int) -> str:
        """The candidate that is best on the tuned half (on its first ``choose_tokens`` tokens)."""
        if len(row.candidates) == 1:
            return row.candidates[0]
        part = self.choosing(lanes)
        names = ["lru", *row.candidates]
        lru, *found = tables(part, [self.cell(n, size, lanes) for n in names], jobs=self.jobs)

        def score(table: RequestTable) -> tuple[float, float]:
            if row.choose == "hits":
                return 0.0, -float(table.hits.sum())
            kept = surely_above(table.hits - lru.hits, table.lookups)
            return max(0.0, -kept), float(table.moved.sum())

        return min(zip(row.candidates, found, strict=True), key=lambda one: score(one[1]))[0]

    def pinned(self, cell: Cell) -> RequestTable:
        """The static pin on the other half; filling it is not counted."""
        told = self.tuning.access(cell.concurrency)
        shape = len(self.tuning.trace.meta.moe_layers), self.tuning.trace.meta.n_expert
        uses = np.zeros(shape, np.int64)
        np.add.at(uses, (np.repeat(told.set_layer, np.diff(told.offsets)), told.experts), 1)
        mask = np.zeros(shape, np.bool_)
        part = self.held_out
        access = part.access(cell.concurrency)
        large = np.zeros(len(access.set_step), np.bool_)
        for number, members in enumerate(part.pools):
            order = np.argsort(-uses[members].ravel(), kind="stable")[: cell.slots[number]]
            mask[np.array(members)[order // shape[1]], order % shape[1]] = True
            of_pool = np.isin(access.set_layer, members)
            large |= of_pool & ~part.on_cached_path(access, part.slots_by_step(cell, number))
        hit, of_large = lookups_of(access, mask), np.repeat(large, np.diff(access.offsets))
        outcome = np.where(
            of_large, np.where(hit, LARGE_HIT, LARGE_STREAMED), np.where(hit, HIT, DECLINED)
        )
        runs, uncached = np.zeros(len(access.set_step), np.int64), np.zeros(shape[0], np.bool_)
        return by_request(part, Outcomes(access, outcome.astype(np.uint8), runs, uncached, None))

    def report(self, chosen: Mapping[str, str], size: str, lanes: int) -> dict[str, RequestTable]:
        """Row name -> counters on the other half, the references among them."""
        cells = {name: self.cell(spec, size, lanes) for name, spec in chosen.items() if spec != PIN}
        cells |= {f"{name}*": self.cell(name, size, lanes) for name in REFERENCES}
        found = tables_and_rows(self.held_out, list(cells.values()), jobs=self.jobs)
        measured = {name: table for name, (table, _) in zip(cells, found, strict=True)}
        pins = [name for name, spec in chosen.items() if spec == PIN]
        return measured | {name: self.pinned(cells["lru*"]) for name in pins}

    def draws(self, measured: Mapping[str, RequestTable]) -> Draws:
        """The same draws of requests for all rows of a cell."""
        return Draws(of_policies(measured), resamples=self.resamples, seed=self.seed)


def figures(draws: Draws, row: str) -> dict[str, Interval]:
    """The INTERVALS of a row."""
    rate, before = figure_of(row, hit_rate), figure_of("lru*", hit_rate)
    return {
        "hit_rate": draws.interval(rate),
        "above_lru": draws.interval(lambda sums: rate(sums) - before(sums)),
        "gap_closed": draws.gap_closed(f"{row}/misses", "lru*/misses", "opt*/misses"),
        "mib_per_token": draws.interval(figure_of(row, mib_per_token)),
        "bytes_lru_over": draws.interval(lambda sums: sums["lru*/moved"] / sums[f"{row}/moved"]),
    }


def run_experiment(
    experiment: Experiment,
    only: Sequence[str],
    jobs: int,
    command: str,
    before: Sequence[Mapping[str, Any]] = (),
) -> Iterator[list[dict[str, Any]]]:
    """The lines of an experiment's table, a cell at a time.

    Args:
        before: lines whose choices are kept; other rows are chosen anew.
    """
    kept = {(int(x["concurrency"]), x["slots"], x["row"]): x["chosen"] for x in before}
    wanted = [row for row in experiment.rows if not only or row.name in only]
    if not wanted:
        raise UsageError(f"{experiment.path}: no row is named {', '.join(only)}")
    halves = Halves(read_picks(experiment), experiment.run, jobs)
    sizes = halves.held_out.layer_bytes
    expert_mib = float(np.mean(sizes)) / 2**20 if sizes else None
    for lanes, size in itertools.product(experiment.run["concurrency"], experiment.run["slots"]):
        started = time.time()
        chosen = {
            row.name: kept.get((lanes, size, row.name)) or halves.choose(row, size, lanes)
            for row in wanted
        }
        measured = halves.report(chosen, size, lanes)
        draws = halves.draws(measured)
        lines = []
        for name, spec in chosen.items():
            found = figures(draws, name)
            moved = found["mib_per_token"].estimate
            known = moved is not None and expert_mib is not None
            lines.append(
                {
                    "trace": experiment.path.stem,
                    "concurrency": lanes,
                    "slots": size,
                    "row": name,
                    "chosen": spec,
                    "version": "" if spec == PIN else version_of(spec),
                    **{k: v for n in INTERVALS for k, v in _three(n, found[n]).items()},
                    "uploads_per_token": moved / expert_mib if known else None,
                    "requests": draws.requests,
                    "lookups": int(measured[name].lookups.sum()),
                    "simlab": __version__,
                    "trace_hash": halves.trace_hash,
                    "command": command,
                }
            )
        seconds = time.time() - started
        print(f"{experiment.path.stem}: C = {lanes}, {size}: {seconds:.0f} s", file=sys.stderr)
        yield lines


def version_of(spec: str) -> str:
    """Version and hash of a candidate's policy."""
    policy = policy_with_parameters(spec)[0]
    return f"{policy.version} {policy.hash[:12]}"


def _three(name: str, value: Interval) -> dict[str, float | None]:
    return {name: value.estimate, f"{name}_low": value.low, f"{name}_high": value.high}


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines of a table that was written, or none."""
    if not path.is_file():
        return []
    with open(path, encoding="utf-8", newline="") as source:
        return list(csv.DictReader(source))


def merged(
    old: Sequence[Mapping[str, Any]], new: Sequence[Mapping[str, Any]], order: Sequence[str]
) -> list[Mapping[str, Any]]:
    """The new lines, and the old ones that none of them replaces, in the experiment's order."""

    def cell(line: Mapping[str, Any]) -> tuple[int, float]:
        return int(line["concurrency"]), float(line["slots"].rstrip("%"))

    again = {(*cell(line), line["row"]) for line in new}
    kept = [x for x in old if (*cell(x), x["row"]) not in again and x["row"] in order]
    return sorted([*kept, *new], key=lambda line: (*cell(line), order.index(line["row"])))


def written(lines: Sequence[Mapping[str, Any]]) -> bytes:
    """A CSV file of these lines."""
    text = io.StringIO()
    table = csv.DictWriter(text, list(lines[0]), lineterminator="\n")
    table.writeheader()
    for line in lines:
        table.writerow({k: f"{v:.6g}" if isinstance(v, float) else v for k, v in line.items()})
    return text.getvalue().encode()


def main(arguments: Sequence[str]) -> int:
    """Run it; the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("experiments", nargs="+", type=Path)
    parser.add_argument("--only", default=[], action="append", help="a row to run, by name")
    parser.add_argument("--again", action="store_true", help="replay what was chosen before")
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--out", type=Path, help="folder of the CSV files; default: the file's own")
    parser.add_argument("--tables", action="store_true", help="print the tables, run nothing")
    given = parser.parse_args(arguments)
    only: list[str] = given.only
    every: list[dict[str, Any]] = []
    text: list[str] = []
    try:
        for path in given.experiments:
            experiment = read_experiment(path)
            target = (given.out or path.parent) / f"{path.stem}.csv"
            if given.tables:
                every += read_lines(target)
                text += tables_of(read_lines(target))
                continue
            order = [row.name for row in experiment.rows]
            told = ["--again"] * given.again + [x for name in only for x in ("--only", name)]
            # where it is written changes no figure
            command = shlex.join(["python", "scripts/real_traces.py", str(path), *told])
            before = read_lines(target) if given.again else []
            for lines in run_experiment(experiment, only, given.jobs, command, before):
                write_atomically(target, written(merged(read_lines(target), lines, order)))
            print(f"Written: {target}")
    except SimlabError as exc:
        print(f"Error: {exc}", file=sys.stderr)
        return exc.exit_code
    if given.tables:
        print("\n".join([*HEADING, *summary_of(every), "", *text]).rstrip())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
