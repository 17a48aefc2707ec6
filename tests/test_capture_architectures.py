"""Captured ids are those of the experts that executed, for the architectures of transformers."""

from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="transformers is not installed")

from architectures import CASES, Case, build, compare  # noqa: E402

from simlab.capture.hooks import attach  # noqa: E402
from simlab.errors import SimlabError, UsageError  # noqa: E402

IDS = torch.randint(3, 96, (2, 12), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def case_of(module):
    return next(case for case in CASES if case.module == module)


def tiny(module="qwen3_moe", **config):
    case = case_of(module)
    return build(Case(case.module, case.model, {**case.config, **config}))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.module)
def test_captured_ids_are_the_experts_that_executed(case):
    try:
        model = build(case)
    except (ImportError, AttributeError) as exc:
        pytest.skip(f"this transformers has no {case.model}: {exc}")
    sites, checked, agreed = compare(model)
    assert sites
    assert checked >= len(sites) * 15  # 24 tokens a site; some run no expert
    assert agreed == checked


def test_enough_architectures_are_compared_and_all_stand_in_the_table():
    table = (Path(__file__).parents[1] / "docs" / "capture-architectures.md").read_text()
    assert len(CASES) >= 25
    assert [case.name for case in CASES if f"| {case.name} |" not in table] == []


@pytest.mark.parametrize("kind", ["eager", "batched_mm", "grouped_mm"])
def test_every_implementation_of_the_experts_is_seen(kind):
    model = tiny()
    model.set_experts_implementation(kind)
    _, checked, agreed = compare(model)
    assert checked == agreed == 3 * 24 * 3


def test_layers_without_experts_keep_their_numbers():
    with attach(tiny("deepseek_v3")) as tap:
        assert tap.moe_layers == (1, 2)
        assert tap.sites[0].path == "model.layers.1.mlp.experts"
        assert (tap.n_expert, tap.k) == (8, 3)
        assert tap.expert_bytes() == ((2 * 16 * 32 * 4, 16 * 32 * 4),) * 2


@pytest.mark.parametrize("module", ["longcat_flash", "zaya", "switch_transformers"])
def test_identity_experts_and_skipped_tokens_are_no_picks(module):
    model = tiny(module)
    with attach(model) as tap, torch.no_grad():
        model(
            input_ids=IDS,
            **({"decoder_input_ids": IDS} if model.config.is_encoder_decoder else {}),
        )
        ids = tap.take().experts()
    assert tap.n_expert == 8
    assert (ids == -1).any() and ids.max() < 8


def test_weights_stand_beside_their_experts():
    model = tiny()
    routed = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda m, args, out: routed.append(out))
    with attach(model, weights=True) as tap, torch.no_grad():
        model(input_ids=IDS)
        picks = tap.take()
    _, weights, ids = routed[0]
    assert np.array_equal(picks.experts()[:, 1], ids.numpy())
    assert np.array_equal(picks.router_weights()[:, 1], weights.half().numpy())


def test_the_best_logits_are_not_the_picks_where_a_bias_or_groups_decide():
    # why ids are read at the experts; it also shows that the comparison can tell right from wrong
    model = tiny("deepseek_v3")
    logits = []
    model.model.layers[1].mlp.gate.register_forward_hook(lambda m, args, out: logits.append(out[0]))
    with attach(model) as tap, torch.no_grad():
        model(input_ids=IDS)
        ids = tap.take().experts()[:, 0]
    best = logits[0].topk(3).indices.numpy()
    assert (np.sort(best) != np.sort(ids)).any(1).mean() > 0.3


def test_hooks_go_when_the_block_ends():
    model = tiny()
    with attach(model):
        pass
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())


def test_a_layer_that_a_kernel_goes_round_is_named():
    model = tiny()
    block = model.model.layers[1].mlp
    block.forward = lambda hidden: hidden  # what a fused kernel looks like from outside
    with attach(model) as tap, torch.no_grad():
        model(input_ids=IDS)
        with pytest.raises(SimlabError, match=r"Qwen3MoeForCausalLM: layer 1 \(.*--hook"):
            tap.take()
        with pytest.raises(SimlabError, match=r"layer 0 .*not called"):
            tap.take()  # nothing is left over from the pass before


def test_a_layer_called_twice_is_named_and_discard_forgets():
    model = tiny()
    with attach(model) as tap, torch.no_grad():
        model(input_ids=IDS)
        tap.discard()
        model(input_ids=IDS)
        with pytest.raises(SimlabError, match=r"layer 0 .*called twice"):
            model(input_ids=IDS)


@pytest.mark.parametrize(
    ("module", "name", "config", "reason"),
    [
        ("doge", "DogeForCausalLM", {"is_moe": True, "num_experts": 16}, "product keys"),
        (
            "nllb_moe",
            "NllbMoeForConditionalGeneration",
            {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32,
             "decoder_ffn_dim": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
             "encoder_sparse_step": 2, "decoder_sparse_step": 2},
            "mask of 0 and 1",
        ),
        ("llama", "LlamaForCausalLM", {}, "no MoE layer found.*--hook"),
    ],
)  # fmt: skip
def test_refused_with_the_reason(module, name, config, reason):
    model = build(Case(module, name, config))
    with pytest.raises(SimlabError, match=f"{name}.*{reason}"):
        attach(model)


def test_experts_of_unknown_form_are_not_passed_over():
    model = tiny()
    model.model.layers[2].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(32, 32)])
    with pytest.raises(SimlabError, match=r"model.layers.2.mlp.experts \(ModuleList\).*--hook"):
        attach(model)


class Router(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Linear(16, 6)

    def forward(self, x):
        best = self.weight(x).softmax(-1).topk(2)
        return best.values, best.indices


class Plain(torch.nn.Module):
    """A torch model of nobody's framework: experts in a list, called one by one."""

    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            [torch.nn.ModuleDict({"router": Router(), "pool": Pool()}) for _ in range(3)]
        )

    def forward(self, x):
        for block in self.blocks:
            weights, chosen = block["router"](x)
            x = x + block["pool"](x, picks=chosen, scale=weights)
        return x


class Pool(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.num_experts = 6
        self.members = torch.nn.ModuleList([torch.nn.Linear(16, 16) for _ in range(6)])

    def forward(self, x, picks, scale):
        every = torch.stack([member(x) for member in self.members], -2)
        index = picks[..., None].expand(*picks.shape, 16)
        return (every.gather(-2, index) * scale[..., None]).sum(-2)


@pytest.mark.parametrize("which", ["pool:1", "pool:picks", "router:out.1"])
def test_a_hook_describes_any_torch_model(which):
    torch.manual_seed(0)
    model = Plain()
    x = torch.randn(2, 5, 16)
    if which.startswith("router"):
        for block in model.blocks:
            block["router"].num_experts = 6
    with attach(model, hook=f"blocks.*.{which}") as tap, torch.no_grad():
        model(x)
        picks = tap.take()
        expected = model.blocks[0]["router"](x)[1].reshape(10, 2)
    assert tap.moe_layers == (0, 1, 2) and tap.n_expert == 6 and tap.k == 2
    assert (picks.experts()[:, 0] == expected.numpy()).all()


def test_plain_experts_with_the_usual_signature_need_no_hook():
    class Experts(Pool):
        def forward(self, x, topk_ids, topk_weights):
            return super().forward(x, topk_ids, topk_weights)

    class Model(Plain):
        def forward(self, x):
            for block in self.blocks:
                weights, chosen = block["router"](x)
                x = x + block["pool"](x, chosen, topk_weights=weights)
            return x

    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        block["pool"] = Experts()
    with attach(model, weights=True) as tap, torch.no_grad():
        model(torch.randn(7, 16))
        picks = tap.take()
    assert picks.experts().shape == picks.router_weights().shape == (7, 3, 2)


@pytest.mark.parametrize(
    ("hook", "message"),
    [
        ("model.layers.*.mlp.experts", "not PATTERN:ARGUMENT"),
        ("model.layers.*.mlp.expertz:1", "no module of Qwen3MoeForCausalLM matches"),
    ],
)
def test_bad_hooks(hook, message):
    with pytest.raises(UsageError, match=message):
        attach(tiny(), hook=hook)


@pytest.mark.parametrize(
    ("which", "message"),
    [
        ("0", "not a tensor of expert ids, but torch.float32"),
        ("9", "not a tensor of expert ids, but NoneType"),
        ("nothing", "has no argument 'nothing'"),
    ],
)
def test_a_hook_on_the_wrong_argument_says_what_it_met(which, message):
    model = tiny()
    with attach(model, hook=f"model.layers.*.mlp.experts:{which}"), torch.no_grad():
        with pytest.raises(SimlabError, match=message):
            model(input_ids=IDS)
