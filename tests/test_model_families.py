"""Our one decoder against transformers, on small random configurations saved to disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    PretrainedConfig,
    Qwen2Config,
    Qwen3Config,
)

from infer_lab.kv_cache import NoCache
from infer_lab.model.config import ModelConfig
from infer_lab.model.load import load_model
from infer_lab.model.transformer import Transformer

SIZES: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 8,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": 2,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
LINEAR = {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}

FAMILIES: dict[str, PretrainedConfig] = {
    "llama": LlamaConfig(**SIZES),
    "llama tied": LlamaConfig(**SIZES, tie_word_embeddings=True),
    "llama biases": LlamaConfig(**SIZES, attention_bias=True, mlp_bias=True),
    "llama head size": LlamaConfig(**SIZES | {"head_dim": 20}),
    "llama no head size": LlamaConfig(**SIZES | {"head_dim": None}),
    "llama one kv head": LlamaConfig(**SIZES | {"num_key_value_heads": 1}),
    "llama all kv heads": LlamaConfig(**SIZES | {"num_key_value_heads": 6}),
    "llama eps": LlamaConfig(**SIZES, rms_norm_eps=1e-3),
    "llama theta": LlamaConfig(**SIZES, rope_parameters={"rope_type": "default", "rope_theta": 77}),
    "llama linear": LlamaConfig(**SIZES, rope_parameters=LINEAR),
    "llama llama3": LlamaConfig(**SIZES, rope_parameters=LLAMA3),
    "mistral": MistralConfig(**SIZES, sliding_window=None),
    "mistral wide window": MistralConfig(**SIZES, sliding_window=256),
    "qwen2": Qwen2Config(**{k: v for k, v in SIZES.items() if k != "head_dim"}),
    "qwen2 tied": Qwen2Config(
        **{k: v for k, v in SIZES.items() if k != "head_dim"}, tie_word_embeddings=True
    ),
    "qwen3": Qwen3Config(**SIZES | {"head_dim": 12}),
    "qwen3 biases tied": Qwen3Config(**SIZES, attention_bias=True, tie_word_embeddings=True),
}


def save_random(config: PretrainedConfig, directory: Path, **options: Any) -> torch.nn.Module:
    """A transformers model with every parameter random, biases and norms too, saved to disk."""
    torch.manual_seed(5)
    oracle = AutoModelForCausalLM.from_config(config).eval()
    for name, parameter in oracle.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.2)
    oracle.save_pretrained(directory, **options)
    return oracle


def our_logits(model: Transformer, token_ids: torch.Tensor) -> torch.Tensor:
    return model.logits(model(token_ids, torch.arange(len(token_ids)), NoCache()))


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_agree_with_transformers(name: str, tmp_path: Path) -> None:
    oracle = save_random(FAMILIES[name], tmp_path)
    model = load_model(tmp_path, device="cpu", dtype="float32")
    token_ids = torch.randint(0, 131, (200,))
    with torch.inference_mode():
        expected = oracle(token_ids[None]).logits[0]
        torch.testing.assert_close(our_logits(model, token_ids), expected, atol=1e-4, rtol=0)


def test_the_switches_make_a_difference(tmp_path: Path) -> None:
    """The families above would prove nothing if biases or RoPE scaling left no trace."""
    token_ids = torch.randint(0, 131, (200,))
    seen = []
    for name in ("llama", "llama biases", "llama linear", "llama llama3", "llama eps"):
        save_random(FAMILIES[name], tmp_path / name)
        seen.append(our_logits(load_model(tmp_path / name, dtype="float32"), token_ids))
    for i, first in enumerate(seen):
        assert all((first - second).abs().max() > 1e-2 for second in seen[:i])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
def test_files_of_any_dtype_load_into_any_dtype(dtype: str, tmp_path: Path) -> None:
    save_random(LlamaConfig(**SIZES), tmp_path / "full")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "full", dtype=getattr(torch, dtype))
    saved.save_pretrained(tmp_path / "cast")
    model = load_model(tmp_path / "cast", device="cpu", dtype="float32")
    oracle = AutoModelForCausalLM.from_pretrained(tmp_path / "cast", dtype=torch.float32)
    token_ids = torch.randint(0, 131, (50,))
    with torch.inference_mode():
        expected = oracle(token_ids[None]).logits[0]
        torch.testing.assert_close(our_logits(model, token_ids), expected, atol=1e-4, rtol=0)
        cast = load_model(tmp_path / "full", device="cpu", dtype=dtype)
    assert cast.dtype == getattr(torch, dtype)
    assert our_logits(cast, token_ids).isfinite().all()


def test_sharded_weights_load_like_one_file(tmp_path: Path) -> None:
    config = LlamaConfig(**SIZES)
    save_random(config, tmp_path / "one")
    save_random(config, tmp_path / "many", max_shard_size="50kB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 2
    token_ids = torch.randint(0, 131, (30,))
    one, many = (load_model(tmp_path / name, dtype="float32") for name in ("one", "many"))
    assert torch.equal(our_logits(one, token_ids), our_logits(many, token_ids))


@pytest.mark.parametrize(("eos", "expected"), [(2, (2,)), ([5, 2], (5, 2)), (None, ())])
def test_eos_is_a_number_a_list_or_nothing(eos: Any, expected: tuple[int, ...]) -> None:
    assert ModelConfig.from_dict(config_dict(eos_token_id=eos)).eos_token_ids == expected


def test_the_generation_config_decides_about_eos() -> None:
    config = ModelConfig.from_dict(config_dict(eos_token_id=2), {"eos_token_id": [7, 8]})
    assert config.eos_token_ids == (7, 8)


def test_configs_of_transformers_4_are_read_too() -> None:
    old = config_dict(rope_theta=500.0, rope_scaling={"type": "linear", "factor": 4.0})
    old["torch_dtype"] = "bfloat16"
    config = ModelConfig.from_dict(old)
    assert (config.rope.theta, config.rope.kind, config.rope.factor) == (500.0, "linear", 4.0)
    assert config.dtype == "bfloat16"


def config_dict(**changes: Any) -> dict[str, Any]:
    return {"model_type": "llama"} | SIZES | changes


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"model_type": "gpt2"}, "gpt2"),
        ({"model_type": None}, "None"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "yarn"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "dynamic"),
        ({"rope_scaling": {"rope_type": "longrope"}}, "longrope"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "low_freq_factor"),
        ({"rope_scaling": {"rope_type": "linear"}}, "factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor 0.5"),
        ({"model_type": "mistral", "sliding_window": 64}, "sliding_window 64"),
        ({"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": True}, "sliding_wi"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding_attention"),
        ({"hidden_act": "gelu"}, "gelu"),
        ({"quantization_config": {"quant_method": "gptq"}}, "gptq"),
        ({"hidden_size": None}, "hidden_size"),
        ({"num_attention_heads": 5}, "num_heads must be a multiple"),
        ({"num_hidden_layers": 0}, "num_layers must be >= 1"),
        ({"head_dim": 7}, "head_size must be even"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        ModelConfig.from_dict(config_dict(**changes))


def test_a_window_that_is_switched_off_is_no_window() -> None:
    changes = {"model_type": "qwen2", "sliding_window": 64, "use_sliding_window": False}
    assert ModelConfig.from_dict(config_dict(**changes)).architecture == "qwen2"


@pytest.mark.parametrize(
    "changes",
    [
        {"num_attention_heads": 0},
        {"num_key_value_heads": "2"},
        {"num_key_value_heads": 2.0},
        {"head_dim": "x"},
        {"max_position_embeddings": 1e9},
        {"rope_scaling": [1]},
        {"rope_parameters": {"rope_type": "linear", "factor": 0}},
        {"rope_parameters": {"rope_type": "linear", "factor": None}},
        {"rope_parameters": {"rope_type": "default", "rope_theta": "x"}},
        {"rope_theta": -1},
        {"rope_theta": float("inf")},
        {"rms_norm_eps": "x"},
        {"rms_norm_eps": float("nan")},
        {"rms_norm_eps": -1},
        {"eos_token_id": {"a": 1}},
        {"eos_token_id": ["a"]},
        {"eos_token_id": [None]},
        {"eos_token_id": 1.5},
        {"quantization_config": "x"},
        {"layer_types": 5},
        {"sliding_window": "x"},
    ],
    ids=str,
)
def test_nonsense_in_a_config_is_a_clear_error(changes: dict[str, Any]) -> None:
    (name,) = changes
    name = {"num_attention_heads": "num_heads"}.get(name, name)
    with pytest.raises(ValueError, match=f"{name}|factor|rope_theta"):
        ModelConfig.from_dict(config_dict(**changes))


def test_a_config_nested_without_end_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[" * 100_000)
    with pytest.raises(ValueError, match="cannot be read as JSON"):
        ModelConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("file", [5, ["x"], None])
def test_an_index_names_files_by_text(file: Any, tmp_path: Path) -> None:
    save_random(LlamaConfig(**SIZES), tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match="weight_map from tensors to file names"):
        load_model(tmp_path, dtype="float32")


def test_damaged_directories_are_refused(tmp_path: Path) -> None:
    save_random(LlamaConfig(**SIZES), tmp_path)
    weights = tmp_path / "model.safetensors"
    whole = weights.read_bytes()
    for damage in (whole[:-10], whole[: len(whole) // 2], whole[:4], b""):
        weights.write_bytes(damage)
        with pytest.raises(ValueError, match=r"model\.safetensors"):
            load_model(tmp_path, dtype="float32")
    weights.unlink()
    with pytest.raises(ValueError, match="safetensors"):
        load_model(tmp_path, dtype="float32")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model(tmp_path, dtype="float32")


def test_wrong_shapes_and_missing_layers_are_refused(tmp_path: Path) -> None:
    save_random(LlamaConfig(**SIZES), tmp_path)
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    for changes, named in [
        ({"num_hidden_layers": 4}, "no weights for layers.3"),
        ({"num_hidden_layers": 2}, "unexpected tensor"),
        ({"vocab_size": 130}, "must have shape"),
        ({"num_key_value_heads": 3}, "must have shape"),
    ]:
        path.write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=named):
            load_model(tmp_path, dtype="float32")


def test_an_index_cannot_point_outside_its_directory(tmp_path: Path) -> None:
    save_random(LlamaConfig(**SIZES), tmp_path / "secret")
    save_random(LlamaConfig(**SIZES), tmp_path / "model")
    (tmp_path / "model" / "model.safetensors").unlink()
    index = {"weight_map": {"lm_head.weight": "../secret/model.safetensors"}}
    (tmp_path / "model" / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match="does not exist"):
        load_model(tmp_path / "model", dtype="float32")


@pytest.mark.parametrize("device", ["gpu", "cuda:99", "", "cpu:x"])
def test_unknown_devices_are_refused_by_name(device: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="device"):
        load_model(tmp_path, device=device)


def test_unknown_dtypes_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="'int8'"):
        load_model(tmp_path, dtype="int8")
