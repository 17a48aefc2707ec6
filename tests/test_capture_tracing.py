"""simlab.capture.tracing: what code of one's own computes, as a trace."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="transformers is not installed")

from architectures import CASES, build  # noqa: E402

import simlab.capture  # noqa: E402
from simlab.errors import SimlabError  # noqa: E402
from simlab.trace.read import read_trace  # noqa: E402
from simlab.trace.validate import check_trace  # noqa: E402

PROMPTS = ([5, 9, 11, 4, 60, 7, 8], [70, 33, 12], [44, 45, 46, 47, 48])


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)
    model = build(next(case for case in CASES if case.module == "qwen3_moe"))
    model.generation_config.pad_token_id = 0
    model.generation_config.eos_token_id = None
    return model


def padded(prompts=PROMPTS, left=True):
    width = max(map(len, prompts))
    blanks = [[0] * (width - len(p)) for p in prompts]
    ids = [b + p if left else p + b for b, p in zip(blanks, prompts, strict=True)]
    mask = [
        [0] * len(b) + [1] * len(p) if left else [1] * len(p) + [0] * len(b)
        for b, p in zip(blanks, prompts, strict=True)
    ]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def rows_of(trace, request):
    """{(token, layer): (phase, experts)} of one request."""
    return {
        (int(trace.token[r]), int(trace.layer[r])): (
            int(trace.phase[r]),
            trace.experts[trace.offsets[r] : trace.offsets[r + 1]].tolist(),
        )
        for r in np.flatnonzero(trace.request == request)
    }


def alone(model, prompt, **options):
    with simlab.capture.tracing(model) as t:
        model.generate(torch.tensor([prompt]), **options)
    return rows_of(t.trace, 0)


def test_three_lines(model, tmp_path):
    with simlab.capture.tracing(model, weights=True) as t:
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=4, do_sample=False)
    t.save(tmp_path / "t.parquet")
    trace = read_trace(tmp_path / "t.parquet")
    assert trace.n_rows == 3 * (7 + 3)  # the last token generated is never computed
    assert trace.phase.reshape(10, 3)[:, 0].tolist() == [0] * 7 + [1] * 3
    assert trace.step.reshape(10, 3)[:, 0].tolist() == [0] * 7 + [1, 2, 3]
    assert trace.weights is not None and trace.meta.kind == "captured"
    assert (trace.meta.n_expert, trace.meta.k, trace.meta.moe_layers) == (8, 3, (0, 1, 2))
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefill_chunk_size": 2},
        {"cache_implementation": "static", "disable_compile": True},
    ],
    ids=["plain", "chunked", "static"],
)
def test_a_left_padded_batch_is_three_single_runs(model, options):
    options = {**options, "max_new_tokens": 5, "do_sample": False}
    with simlab.capture.tracing(model) as t:
        model.generate(**padded(), **options)
    check_trace(t.trace)
    for i, prompt in enumerate(PROMPTS):
        assert rows_of(t.trace, i) == alone(model, prompt, max_new_tokens=5, do_sample=False)


def test_nothing_after_the_end_of_a_sequence(model):
    options = {"max_new_tokens": 8, "do_sample": False}
    out = model.generate(**padded(), **options)[:, 7:]
    end = int(out[1, 3])  # ends the second sequence in the middle, others later or never
    with simlab.capture.tracing(model) as t:
        model.generate(**padded(), **options, eos_token_id=end)
    for i, prompt in enumerate(PROMPTS):
        generated = out[i].tolist()
        computed = generated.index(end) if end in generated else 7
        whole = alone(model, prompt, **options)
        kept = {key: row for key, row in whole.items() if key[0] < len(prompt) + computed}
        assert rows_of(t.trace, i) == kept


def test_several_answers_to_a_prompt_are_requests_of_their_own(model):
    torch.manual_seed(3)
    with simlab.capture.tracing(model) as t:
        model.generate(**padded(), max_new_tokens=3, do_sample=True, num_return_sequences=2)
    trace = t.trace
    assert sorted(set(trace.request.tolist())) == [0, 1, 2, 3, 4, 5]
    for i in range(6):
        assert len(rows_of(trace, i)) == 3 * (len(PROMPTS[i // 2]) + 2)


@pytest.mark.parametrize("left", [True, False])
def test_plain_forward_passes_and_their_cache(model, left):
    inputs = padded(left=left)
    with simlab.capture.tracing(model) as t, torch.no_grad():
        model(**inputs)
        out = model(torch.tensor([PROMPTS[1]]))
        model(torch.tensor([[20, 21]]), cache=out.past_key_values)
    trace = t.trace
    assert [len(rows_of(trace, i)) // 3 for i in range(4)] == [7, 3, 5, 5]
    decoded = rows_of(trace, 3)
    assert [decoded[token, 0][0] for token in range(5)] == [0, 0, 0, 1, 1]
    with simlab.capture.tracing(model) as t, torch.no_grad():
        model(torch.tensor([PROMPTS[1] + [20, 21]]))
    whole = rows_of(t.trace, 0)
    assert {key: row[1] for key, row in whole.items()} == {k: r[1] for k, r in decoded.items()}
    if left is False:  # positions are those of the text: right padding changes none
        assert rows_of(trace, 1) == {k: r for k, r in rows_of(trace, 3).items() if k[0] < 3}


@pytest.mark.parametrize("module", ["lfm2_moe", "longcat_flash", "gpt_oss"])
def test_other_architectures_give_valid_traces(module):
    model = build(next(case for case in CASES if case.module == module))
    with simlab.capture.tracing(model, weights=True) as t:
        model.generate(
            torch.tensor([PROMPTS[0]]), max_new_tokens=3, do_sample=False, eos_token_id=None
        )
    check_trace(t.trace)
    assert len(set(t.trace.token.tolist())) == 9


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_beams": 2}, "beam search cannot be traced"),
        ({"prompt_lookup_num_tokens": 3}, "assisted decoding cannot be traced"),
    ],
)
def test_what_cannot_be_traced_is_refused(model, options, message):
    with simlab.capture.tracing(model), pytest.raises(SimlabError, match=message):
        model.generate(torch.tensor([PROMPTS[0]]), max_new_tokens=3, **options)


def test_nothing_ran(model):
    with simlab.capture.tracing(model) as t:
        pass
    with pytest.raises(SimlabError, match="nothing ran"):
        t.trace  # noqa: B018


def test_a_cache_of_untraced_tokens_is_refused(model):
    with torch.no_grad():
        out = model(torch.tensor([PROMPTS[0]]))
        with simlab.capture.tracing(model), pytest.raises(SimlabError, match="cache of 7 tokens"):
            model(torch.tensor([[20]]), cache=out.past_key_values)
