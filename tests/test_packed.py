"""Packed weights: the same products, whoever asks."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from infer_lab import Engine, SamplingParams
from infer_lab.model.packed import PackedLinear, can_pack, pack_linears
from infer_lab.model.transformer import Transformer
from tests.conftest import random_model

needs_onednn = pytest.mark.skipif(
    not can_pack(torch.empty(2, 2)), reason="no packed products on this machine"
)


def float_model() -> Transformer:
    return random_model().float()


@needs_onednn
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("rows", [(0,), (1,), (7,), (3, 5), ()])
def test_a_packed_product_is_the_product(bias: bool, rows: tuple[int, ...]) -> None:
    linear = nn.Linear(24, 40, bias=bias).requires_grad_(False)
    x = torch.randn(*rows, 24)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), rtol=1e-5, atol=1e-5)
    assert torch.equal(PackedLinear(linear).weight, linear.weight)


@needs_onednn
def test_every_product_of_a_model_is_packed_and_the_embedding_stays() -> None:
    model = float_model()
    table = model.embed_tokens.weight
    pack_linears(model)
    assert not any(isinstance(module, nn.Linear) for module in model.modules())
    assert model.embed_tokens.weight is table and model.dtype == torch.float32


@needs_onednn
def test_an_engine_over_packed_weights_says_the_same() -> None:
    model = float_model()
    packed = copy.deepcopy(model)
    pack_linears(packed)
    params = SamplingParams(max_tokens=8, temperature=0, ignore_eos=True)
    prompts = [[1, 2, 3], [40, 41, 42, 43, 44], [7]]
    expected = [c.token_ids for c in Engine(model).generate(prompts, params)]
    assert [c.token_ids for c in Engine(packed).generate(prompts, params)] == expected


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_what_has_no_packed_product_is_left_alone(dtype: torch.dtype) -> None:
    model = random_model().to(dtype)
    before = [type(module) for module in model.modules()]
    pack_linears(model)
    assert [type(module) for module in model.modules()] == before


def test_an_unknown_option_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(TypeError, match="max_seqs"):
        Engine.from_pretrained("/nowhere", max_seqs=3)
