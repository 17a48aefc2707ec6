"""Model in the loop: experts computed from a slot pool, and checks that can fail."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch", reason="live mode needs torch: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="running a model needs transformers")

import architectures
import torch
from live_model_cases import (
    at_step,
    build,
    cell,
    one_thread,  # noqa: F401 (for all tests of the module)
    run,
    state,
)

from simlab.capture.engine import Settings
from simlab.errors import SimlabError, UsageError
from simlab.live import pooled
from simlab.live.device import Device, open_device
from simlab.live.pool import SlotPool
from simlab.policy.registry import load_policy
from simlab.trace.read import read_trace

MODELS = ["qwen3_moe", "mixtral", "deepseek_v3", "gpt_oss", "olmoe", "nemotron_h", "aria"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MODELS)
def test_the_reference_path_gives_every_bit_of_the_whole_model(name: str, dtype: str) -> None:
    model = build(name, getattr(torch, dtype))
    before = state(model)
    # one slot: everything is streamed; 3 = k: the smallest pool with a cached path
    cells = [cell("lru", slots) for slots in ("1", "3", "50%", "100%")]
    cells += [cell("mix"), cell("lfu-decay", "3"), cell("lfu-decay"), cell("lfu-decay", "50%", 3)]
    found = run(model, *cells)
    assert len(found) == len(cells)
    for one in found:
        assert one.comparison is not None and one.comparison.identical and one.failed == ""
        assert one.comparison.steps == one.check.simulated.counters.steps > 6
        assert one.check.equal and one.check.measured is not None
        assert one.check.measured.counters == one.check.simulated.counters
        assert one.check.measured.kind == "measured" and one.check.measured.ms_per_token
    by_size = {
        c.size.text: r.check.simulated.counters for c, r in zip(cells[:4], found[:4], strict=True)
    }
    assert by_size["1"].hits == 0 and by_size["1"].streamed == by_size["1"].lookups
    assert 0 < by_size["50%"].hits < by_size["100%"].hits
    assert any(r.check.simulated.counters.streamed and r.check.simulated.hit_rate for r in found)
    assert state(model) == before


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
def test_the_fast_path_counts_alike_and_stays_near(name: str, dtype: str) -> None:
    model = build(name, getattr(torch, dtype))
    cells = [cell("lru", "1"), cell("lru", "3"), cell("lfu-decay"), cell("lru", "50%", 3)]
    for one in run(model, *cells, path="fast"):
        assert one.failed == "" and one.check.equal
        assert one.comparison is not None
        assert one.comparison.identical or one.comparison.first is not None
        assert one.comparison.max_abs_logits < 0.05


REFUSED = {"dbrx", "jetmoe", "llama4", "switch_transformers"}


@pytest.mark.parametrize("case", architectures.CASES, ids=lambda case: case.module)
def test_every_architecture_is_computed_or_refused(case: Any) -> None:
    """Without an engine: some models have no logits, or a cache that it does not know."""
    from simlab.capture.hooks import attach
    from simlab.live.experts import implementation, take_apart, taken_out
    from simlab.live.forward import reference
    from simlab.model.layout import group_layers

    model = architectures.build(case)
    with attach(model) as tap:
        if case.module in REFUSED:
            with pytest.raises(SimlabError, match="cannot be computed from a slot pool"):
                take_apart(model, tap.sites)
            return
        layers = take_apart(model, tap.sites)
        layout = group_layers(tap.n_expert, tap.k, tap.moe_layers, tap.expert_bytes())
    torch.manual_seed(1)
    texts = [torch.randint(3, 96, shape) for shape in ((1, 12), (2, 9), (1, 2), (1, 40))]

    def outputs() -> list[Any]:
        return [
            architectures.first_tensor(model(input_ids=ids, use_cache=False, return_dict=False))
            for ids in texts
        ]

    with torch.inference_mode(), implementation(layers, "eager"), open_device("cpu") as device:
        whole = outputs()
        for slots in (1, 4, 12):
            served = pooled.PooledExperts(
                device, layers, layout, load_policy("lfu-decay"), [slots] * len(layout.groups),
                params={}, seed=0, on_decline="stream", staging=2,
            )  # fmt: skip
            handle = model.register_forward_pre_hook(
                lambda _m, _a, kwargs, served=served: served.begin_step(
                    kwargs["input_ids"].numel()
                ),
                with_kwargs=True,
            )
            with taken_out(layers, reference(served)):
                for was, now in zip(whole, outputs(), strict=True):
                    assert torch.equal(was, now)
            handle.remove()
            assert len(served.log) >= len(layers)


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_declined_misses_can_be_served_by_the_cpu(path: str) -> None:
    cells = [cell("lfu-decay", "3"), cell("lfu-decay", "50%", 3)]
    for one in run(build("gpt_oss"), *cells, path=path, on_decline="cpu"):
        assert one.failed == ""
        assert one.check.simulated.counters.cpu_served > 0
        assert one.comparison is not None and one.comparison.max_abs_logits < 1e-3
        assert one.comparison.identical or path == "fast"


def test_a_wrong_expert_in_a_slot_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real, calls = SlotPool.upload, []

    def wrong(self: SlotPool, source: Any, expert: int, row: int, count: int = 1) -> None:
        calls.append(expert)
        real(self, source, (expert + 1) % 8 if len(calls) >= 20 else expert, row, count)

    monkeypatch.setattr(SlotPool, "upload", wrong)
    for path in ("reference", "fast"):
        calls.clear()
        (one,) = run(build("mixtral"), cell("lru", "3"), path=path)
        assert len(calls) >= 20
        assert one.comparison is not None and not one.comparison.identical
        first = one.comparison.first
        assert first is not None and first.layer in (0, 1, 2) and first.max_abs > 0
        assert one.comparison.max_abs_logits > 0
        assert one.check.equal  # the counts are right: only the bytes are not
        assert ("not bit-identical" in one.failed) == (path == "reference")


def test_a_cache_that_decides_otherwise_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = pooled.Planner

    def smaller(policy: Any, layout: Any, slots: Any, **others: Any) -> Any:
        return real(policy, layout, [n - 1 for n in slots], **others)

    monkeypatch.setattr(pooled, "Planner", smaller)
    (one,) = run(build("mixtral"), cell("lru", "10"))
    assert not one.check.equal
    assert "live uploaded, replay hit" in one.check.difference
    assert one.failed.startswith("the replay of the captured trace differs")


def test_bytes_that_were_not_planned_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    real = SlotPool.upload

    def twice(self: SlotPool, *args: Any) -> None:
        real(self, *args)
        real(self, *args)

    monkeypatch.setattr(SlotPool, "upload", twice)
    (one,) = run(build("mixtral"))
    assert not one.check.equal and "bytes were copied where the plan says" in one.check.difference


class Elsewhere(Device):
    """Host memory that is said to be a GPU's: experts are moved out of the model and back."""

    kind = "cuda"


def test_experts_that_leave_the_device_come_back() -> None:
    model = build("gpt_oss")
    before = {name: p.clone() for name, p in model.named_parameters()}
    (one,) = run(model, device=Elsewhere())
    assert one.failed == "" and one.comparison is not None and one.comparison.identical
    assert {n: id(p) for n, p in model.named_parameters()}.keys() == before.keys()
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    with pytest.raises(UsageError, match="--path fast"):
        run(model, device=Elsewhere(), on_decline="cpu")


class Late(Device):
    """Copies are done no sooner than compute is told to wait for them."""

    def __init__(self) -> None:
        super().__init__()
        self.main, self.side, self.stream = "main", "side", "main"
        self.queue: list[Any] = []

    @contextmanager
    def on(self, stream: Any) -> Iterator[None]:
        before, self.stream = self.stream, stream
        yield
        self.stream = before

    def wait(self, stream: Any, event: Any) -> None:
        if stream == "main":
            for copy in self.queue:
                copy()
            self.queue.clear()


@pytest.mark.parametrize("path", ["reference", "fast"])
def test_nothing_is_computed_before_its_copies(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    real, device = SlotPool.upload, Late()

    def late(self: SlotPool, *args: Any) -> None:
        assert device.stream == "side"
        device.queue.append(lambda: real(self, *args))

    monkeypatch.setattr(SlotPool, "upload", late)
    for one in run(build("mixtral"), cell("lfu-decay", "3"), cell("lru"), device=device, path=path):
        assert one.failed == "" and one.comparison is not None and one.comparison.identical
    # the check can fail: without the wait the slots hold other experts
    monkeypatch.setattr(Late, "wait", lambda self, stream, event: None)
    (one,) = run(build("mixtral"), device=device, path=path)
    assert one.comparison is not None and not one.comparison.identical


@pytest.mark.parametrize("times", [1, 2])
def test_an_interrupt_keeps_the_steps_done(
    times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt() -> None:
        for _ in range(times):
            signal.raise_signal(signal.SIGINT)

    model, out = build("mixtral"), tmp_path / "t.parquet"
    before, handler = state(model), signal.getsignal(signal.SIGINT)
    at_step(monkeypatch, 6, interrupt)
    (one,) = run(model, cell("lfu-decay"), save_trace=out)
    assert one.partial == "interrupted" and one.interrupted
    # the first Ctrl-C lets the step end, the second one does not
    assert one.check.simulated.counters.steps == (7 if times == 1 else 6)
    assert one.check.equal and one.failed == ""
    assert one.comparison is not None and one.comparison.identical
    assert read_trace(out).meta.partial and "partial" in " ".join(one.check.simulated.notes)
    assert state(model) == before and signal.getsignal(signal.SIGINT) is handler


def test_an_interrupt_ends_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    at_step(monkeypatch, 6, lambda: signal.raise_signal(signal.SIGINT))
    assert len(run(build("mixtral"), cell(), cell("lfu-decay"))) == 1


def test_memory_that_runs_out_keeps_the_steps_done(monkeypatch: pytest.MonkeyPatch) -> None:
    def full() -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB")

    model = build("mixtral")
    before = state(model)
    at_step(monkeypatch, 4, full)
    (one,) = run(model)
    assert one.partial.startswith("out of memory on cpu") and not one.interrupted
    assert one.check.simulated.counters.steps == 4 and one.check.equal
    assert state(model) == before
    at_step(monkeypatch, 0, full)
    with pytest.raises(SimlabError, match="out of memory on cpu: use fewer --slots"):
        run(model)
    assert state(model) == before


def test_a_pool_that_does_not_fit_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("mixtral")
    before = state(model)
    monkeypatch.setattr(Device, "free_memory", lambda self: 1000)
    with pytest.raises(
        SimlabError, match=r"the slot pool \(12 slots\) takes .* take fewer --slots"
    ):
        run(model)
    assert state(model) == before


def test_the_model_is_whole_again_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> None:
        raise ValueError("something else")

    model = build("mixtral")
    before = state(model)
    at_step(monkeypatch, 3, fail)
    with pytest.raises(SimlabError, match="failed with ValueError: something else"):
        run(model)
    assert state(model) == before


def test_too_much_to_compare_is_said_first(monkeypatch: pytest.MonkeyPatch) -> None:
    from simlab.live import compare

    monkeypatch.setattr(compare, "host_memory", lambda: 20_000)
    with pytest.raises(SimlabError, match="--no-compare"):
        run(build("mixtral"))
    (one,) = run(build("mixtral"), compare=False)
    assert one.comparison is None and one.check.equal and one.failed == ""


def test_what_does_not_go_is_refused(tmp_path: Path) -> None:
    model = build("mixtral")
    with pytest.raises(UsageError, match="knows the future"):
        run(model, cell("opt"))
    with pytest.raises(UsageError, match="--path must be one of"):
        run(model, path="quick")
    there = tmp_path / "there.parquet"
    there.touch()
    with pytest.raises(UsageError, match="is there already"):
        run(model, save_trace=there)
    with pytest.raises(UsageError, match="one policy and one size"):
        run(model, cell(), cell("mix"), save_trace=tmp_path / "t.parquet")
    with pytest.raises(UsageError, match="padding"):
        run(model, settings=Settings(batch=2))
    with pytest.raises(UsageError, match="no grouped form"):
        run(build("longcat_flash"), path="fast")


def test_a_step_is_compared_once_only() -> None:
    """The first divergence is kept, and the largest difference goes on being looked for."""
    from simlab.live.compare import Comparing, Recording, Step

    def step(ids: int, out: float, logits: float) -> Step:
        one = torch.tensor
        return Step(one([[ids]]), (one([[out]]), one([[out]])), one([[logits]]))

    row = (torch.tensor([7]).numpy(), torch.tensor([4]).numpy())
    kept = Recording([step(1, 0, 0), step(2, 0, 0), step(3, 0, 0)], [row] * 3, {7: [2, 3, 5]})
    held = Comparing(kept, [2, 9])
    for other in (step(1, 0, 0), step(2, 0.5, 0.25), step(3, 0, 2)):
        held.take(other)
    found = held.result({7: [2, 3, 5]})
    assert not found.identical and found.same_text and found.max_abs_logits == 2
    assert str(found.first) == (
        "request 7, token 4 (step 1), in the experts of layer 2: largest difference 0.5"
    )
    assert held.result({7: [2, 4]}).texts_part == (7, 1)
    assert not held.result({7: [2]}).same_text
    assert held.result({7: [2]}, partial=True).same_text
