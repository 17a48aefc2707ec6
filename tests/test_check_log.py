"""Logs in llama.cpp's printed forms, beside what simlab computes: agreeing and not."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf_files import qwen3_30b, write_gguf

from simlab.analysis.check_log import check_slots
from simlab.analysis.llamacpp_log import parse_log, read_log
from simlab.cli import main
from simlab.errors import SimlabError, UsageError
from simlab.model.placement import Placement, place
from simlab.model.plan import plan
from simlab.trace.schema import DECODE, PREFILL, Trace, TraceMeta
from simlab.trace.write import write_trace

MIB = 2**20


def printed(what: str, *values: Any) -> str:
    """A line as llama.cpp's LLAMA_LOG_INFO prints it, behind llama-server's time stamp."""
    forms = {
        "device": "impl: %10s MoE cache size = %8.2f MiB for %.2f MiB of host experts",
        "group": "impl: %2d layers, %s: %5d slots (%.1f%%)",
        "small": "impl: MoE cache budget is too small for %d layers, they are not cached",
        "none": "impl: no layer has all of its experts in host memory, MoE cache is disabled",
        "refused": "llama_init: MoE cache is too small to hold the experts of one token",
        "<=8": "llama_moe_cache: ubatch <= 8: hits = %d, misses = %d, hit rate = %.2f%%,"
        " uploaded = %.2f MiB",
        ">8": "llama_moe_cache: ubatch  > 8: hits = %d, misses = %d, hit rate = %.2f%%,"
        " uploaded = %.2f MiB",
        "large": "llama_moe_cache: large batches: %d experts copied from the cache, %.2f MiB",
    }
    return "0.12.345.678 I " + forms[what] % values + "\n"


GGML_NAMES = {"Q4_K": "q4_K", "Q6_K": "q6_K", "MXFP4": "mxfp4", "F32": "f32"}


def startup(
    placement: Placement, slots: Sequence[int], names: Sequence[str] = ("CUDA0", "CUDA1")
) -> list[str]:
    """The startup lines of a run with these slots, in the layout's order of groups."""
    layout, lines = placement.layout, []
    for device in sorted({group.device for group in layout.groups}):
        own = [i for i, group in enumerate(layout.groups) if group.device == device]
        bank = sum(
            -(-size * (slots[i] + 1) // 128) * 128
            for i in own
            for size in layout.groups[i].tensor_bytes
            if slots[i]
        )
        host = sum(layout.keys_of(i) * sum(layout.groups[i].tensor_bytes) for i in own)
        lines.append(printed("device", names[device], bank / MIB, host / MIB))
        for i in own:
            group, keys = layout.groups[i], layout.keys_of(i)
            share = 100.0 * slots[i] / keys
            kind = GGML_NAMES[group.types[-1]]
            lines.append(printed("group", len(group.layers), kind, slots[i], share))
    return lines


@pytest.fixture(scope="module")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_gguf(tmp_path_factory.mktemp("gguf") / "qwen.gguf", qwen3_30b())[0])


def run(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, lines: Sequence[str], *args: str
) -> tuple[int, dict[str, Any]]:
    log = tmp_path / "server.log"
    log.write_text("".join(["0.00.000.001 I build: 11712\n", *lines, "main: exiting\n"]))
    code = main(["check-log", str(log), *args, "--json"])
    out, err = capsys.readouterr()
    assert err == ""
    return code, json.loads(out)


def line(found: dict[str, Any], what: str) -> dict[str, Any]:
    (match,) = [each for each in found["lines"] if each["what"] == what]
    return dict(match)


def test_the_article_s_log_agrees(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = startup(place(qwen), [1834, 1834])
    assert lines[0].endswith(
        "    CUDA0 MoE cache size =  9999.32 MiB for 16740.00 MiB of host experts\n"
    )
    assert lines[1] == "0.12.345.678 I impl: 24 layers, q6_K:  1834 slots (59.7%)\n"
    for args in (["--mib", "10000"], []):
        code, found = run(capsys, tmp_path, lines, "--layout", qwen, *args)
        assert (code, found["slots_agree"]) == (0, True)
        assert all(each["same"] for each in found["lines"])
        low, high = found["budgets"]
        assert low <= 10000 <= high < low + 12
    # the log's own command line tells the budget
    code, found = run(
        capsys, tmp_path, ["llama-server -cmoe --moe-cache-mib 10000\n", *lines], "--layout", qwen
    )
    assert (code, found["mib"]) == (0, 10000)
    log = str(tmp_path / "server.log")
    assert main(["check-log", log, "--layout", qwen, "--mib", "10000"]) == 0
    text = capsys.readouterr().out
    assert "1834 (59.7%)" in text and "slots and bytes agree" in text and "DIFFERS" not in text


def test_other_slots_are_an_error_with_the_budget_that_explains_them(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    placement = place(qwen)
    other = [each.slots for each in plan(placement.layout, mib=9000).groups]
    code, found = run(
        capsys, tmp_path, startup(placement, other), "--layout", qwen, "--mib", "10000"
    )
    assert code == 1
    wrong = line(found, "group 1: slots")
    assert (wrong["same"], wrong["predicted"]) == (False, "1834 (59.7%)")
    assert wrong["reason"].startswith("the log's slots are those of --moe-cache-mib 89")
    code, found = run(
        capsys, tmp_path, startup(placement, [1834, 900]), "--layout", qwen, "--mib", "10000"
    )
    assert code == 1
    assert line(found, "group 1: slots")["same"]
    assert "no whole --moe-cache-mib" in line(found, "group 2: slots")["reason"]
    log = str(tmp_path / "server.log")
    assert main(["check-log", log, "--layout", qwen]) == 1
    assert "DIFFERS" in capsys.readouterr().out


def test_host_layers_and_quantisations_are_told(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    part = place(qwen, n_cpu_moe=20)
    slots = [each.slots for each in plan(part.layout, mib=1671).groups]
    lines = startup(part, slots)
    code, found = run(capsys, tmp_path, lines, "--layout", qwen, "--mib", "1671")
    assert code == 1
    assert "20 layers had their experts in host memory, not 48" in found["lines"][0]["reason"]
    args = ["--layout", qwen, "--mib", "1671", "--n-cpu-moe", "20"]
    assert run(capsys, tmp_path, lines, *args)[0] == 0
    args = ["--layout", "Qwen3-30B-A3B", "--dtype", "Q4_K", "--mib", "1671", "--n-cpu-moe", "20"]
    code, found = run(capsys, tmp_path, lines, *args)
    assert code == 1
    assert "another quantisation" in found["lines"][0]["reason"]
    assert line(found, "CUDA0: host experts")["same"] is False


def test_two_devices(qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    both = place(qwen, tensor_split="3,2")
    slots = [each.slots for each in plan(both.layout, mib=4000, split=both.split).groups]
    lines = startup(both, slots)
    assert sum("CUDA1" in each for each in lines) == 1
    args = ["--layout", qwen, "--mib", "4000"]
    code, found = run(capsys, tmp_path, lines, *args, "--tensor-split", "3,2")
    assert code == 0 and len(found["lines"]) == 1 + 2 + 4 + 2
    assert run(capsys, tmp_path, lines, *args, "--tensor-split", "1,1")[0] == 1
    assert run(capsys, tmp_path, lines, *args)[0] == 1


def test_refused_disabled_and_partly_cached(
    qwen: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small, refused = printed("small", 24), printed("refused")
    args = ["--layout", qwen]
    assert run(capsys, tmp_path, [small, small, refused], *args, "--mib", "49")[0] == 0
    assert run(capsys, tmp_path, [small, small, refused], *args, "--mib", "50")[0] == 1
    code, found = run(capsys, tmp_path, [printed("none")], *args, "--mib", "500")
    assert code == 1 and "-cmoe" in found["lines"][0]["reason"]
    log = parse_log([small, *startup(place(qwen), [8, 0])])
    assert log.uncached_layers == [24] and log.devices[0].groups[1].slots == 0
    check = check_slots(log, place(qwen).layout, mib=50, split=(1.0,))
    assert not check.slots_agree  # 50 MiB caches both groups


def test_the_last_run_counts(qwen: str) -> None:
    """--fit measures several times before it loads, and logs are appended to."""
    placement = place(qwen)
    first, second = startup(placement, [700, 700]), startup(placement, [1834, 1834])
    gone = printed("<=8", 1, 1, 50.0, 1.0)
    for lines in ([*first, *second], [*first, gone, *second]):
        log = parse_log(lines)
        assert (log.runs, len(log.devices), log.classes) == (2, 1, {})
        assert [g.slots for g in log.devices[0].groups] == [1834, 1834]


@pytest.mark.parametrize("concurrency", [1, 4])
def test_counters_of_llama_cpp_s_planner(
    shared: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], concurrency: int
) -> None:
    """Hits and misses that llama.cpp's own planner gave for a trace, printed as its exit line."""
    with open(shared / "golden" / "llamacpp_lru.csv", newline="") as file:
        (row,) = [
            row
            for row in csv.DictReader(file)
            if (row["trace"], row["concurrency"], row["slots"])
            == ("gptoss20b_decode_a", str(concurrency), "384")
        ]
    placement = place("gpt-oss-20b")
    hits, misses = int(row["hits"]), int(row["misses"])
    uploaded = misses * 13_219_200 / MIB
    rate = 100.0 * hits / (hits + misses)
    lines = [*startup(placement, [384]), printed("<=8", hits, misses, rate, uploaded)]
    trace = shared / "traces" / "gptoss20b_decode_a.parquet"
    args = ["--layout", "gpt-oss-20b", "--trace", str(trace), "--n-expert", "32"]
    code, found = run(capsys, tmp_path, lines, *args, "--concurrency", str(concurrency))
    assert code == 0
    for what in ("hit rate", "lookups", "uploaded"):
        each = line(found, f"steps of <=8 tokens: {what}")
        assert each["logged"] == each["predicted"]
        assert (each["same"], each["reason"]) == (None, "")


def small_model(folder: Path) -> str:
    """One layer, four experts of 3 x 4,096 bytes, one pick a token."""
    config = {
        "num_hidden_layers": 1, "num_experts": 4, "num_experts_per_tok": 1, "hidden_size": 32,
        "moe_intermediate_size": 32, "torch_dtype": "float32",
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder / "config.json")


def small_trace(folder: Path) -> str:
    """Experts 0 and 1 are decoded; then a prompt of 33 tokens picks 0 and 2 in one large step."""
    picks = [0, 1, *([0, 2] * 17)[:33]]
    n = len(picks)
    trace = Trace(
        TraceMeta(n_expert=4, k=1, moe_layers=(0,), expert_bytes=((999,),)),
        np.array([0] * 2 + [1] * 33, np.int32),
        np.array([0, 1, *range(33)], np.int32),
        np.array([DECODE] * 2 + [PREFILL] * 33, np.uint8),
        np.zeros(n, np.int16),
        np.arange(n + 1, dtype=np.int64),
        np.array(picks, np.uint16),
    )
    write_trace(trace, folder / "t.parquet")
    return str(folder / "t.parquet")


def test_large_batches_count_an_expert_once_a_tensor(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, trace = small_model(tmp_path), small_trace(tmp_path)
    lines = [
        *startup(place(model), [4]),
        printed("<=8", 0, 2, 0.0, 2 * 12_288 / MIB),
        printed("large", 3, 12_288 / MIB),
    ]
    code, found = run(capsys, tmp_path, lines, "--layout", model, "--trace", trace)
    assert code == 0
    for each in found["lines"][-4:]:
        assert each["logged"] == each["predicted"] and each["reason"] == ""
    assert found["lines"][-1]["logged"] == "3 (0.01 MiB)"


def test_reasons_of_other_counters(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, trace = small_model(tmp_path), small_trace(tmp_path)
    args = ["--layout", model, "--trace", trace]

    def reason(what: str, *exit_lines: str) -> str:
        code, found = run(capsys, tmp_path, [*startup(place(model), [4]), *exit_lines], *args)
        assert code == 0  # another text is no error
        return str(line(found, what)["reason"])

    rate = "steps of <=8 tokens: hit rate"
    assert "as many lookups" in reason(rate, printed("<=8", 1, 1, 50.0, 0.01))
    assert "another number of lookups" in reason(rate, printed("<=8", 9, 1, 90.0, 0.01))
    assert "on one side only" in reason(rate, printed(">8", 9, 1, 90.0, 0.01))
    more = "steps of 9-32 tokens: hit rate"
    assert "drafts" in reason(more, printed(">8", 9, 1, 90.0, 0.01))
    assert "once for each tensor" in reason("large batches: experts copied")
    # a layout that the trace does not fit
    code = main(["check-log", str(tmp_path / "server.log"), "--layout", model, "--trace", trace])
    assert code == 0
    capsys.readouterr()
    log = tmp_path / "qwen.log"
    log.write_text("".join(startup(place("gpt-oss-20b"), [384])))
    assert main(["check-log", str(log), "--layout", "gpt-oss-20b", "--trace", trace]) == 2
    assert "does not fit the layout" in capsys.readouterr().err


def test_what_is_no_log_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "x.log"
    with pytest.raises(UsageError, match="there is no file"):
        read_log(path)
    long = b"x: CUDA0 MoE cache size = " + b"9" * 3000 + b".00 MiB for 1.00 MiB of host experts"
    for body in (b"", b"hello\n" * 10, b"\x00\xff" * 5000, b"MoE cache " * 9999, long):
        path.write_bytes(body)
        with pytest.raises(SimlabError, match="no line of llama"):
            read_log(path)
    assert main(["check-log", str(path), "--layout", "Mixtral-8x7B"]) == 1
    err = capsys.readouterr().err
    assert "-lv 4" in err and err.count("\n") == 1
