"""Shapes read from configs, beside the experts of the models that transformers builds of them."""

from __future__ import annotations

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install 'simlab[capture]'")
pytest.importorskip("transformers", reason="transformers is not installed")

from architectures import CASES, Case, build

from simlab.capture.hooks import attach
from simlab.model.hf_config import shape_of_config

#: The hooked module is the router, whose weights are not the experts'.
ROUTERS = {"jetmoe", "llama4"}
#: Weights of the experts module that are no expert's: identity experts, a norm.
MORE = {"longcat_flash", "muse_spark"}


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.module)
def test_layers_experts_and_bytes(case: Case) -> None:
    if case.module == "switch_transformers":
        pytest.skip("its config does not state the one expert of a token")
    try:
        model = build(case)
    except (ImportError, AttributeError) as exc:
        pytest.skip(f"this transformers has no {case.model}: {exc}")
    with attach(model) as tap:
        sites = tap.sites
    shape = shape_of_config(model.config.to_dict(), case.module, dtype="F32")
    assert list(shape.experts) == [site.layer for site in sites]
    assert shape.n_expert == sites[0].n_expert
    module = model.get_submodule(sites[0].path)
    weights = sum(p.numel() for name, p in module.named_parameters() if "bias" not in name)
    values = shape.layer_bytes(sites[0].layer) // 4
    if case.module in ROUTERS:
        assert values >= weights
    elif case.module in MORE:
        assert values < weights
    else:
        assert values == weights
