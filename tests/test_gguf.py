"""A GGUF file gives back the transformers model that it was made from, or a clear refusal."""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from gguf import GGMLQuantizationType as TensorType
from safetensors.torch import load_file
from tokenizers import models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Tokenizer,
    LlamaConfig,
    Qwen2Config,
    Qwen2Tokenizer,
    Qwen3Config,
)
from transformers.convert_slow_tokenizer import TikTokenConverter
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from infer_lab.model.gguf import LAYER_NAMES, GGUFModel
from infer_lab.model.gguf_tokenizer import PRE_TOKENIZERS

CORPUS = [
    "the cat sat on the mat, don't they'll 123 4567",
    "  été naïve\n\n\tdef f(x): return x",
] * 3
SPECIAL = ["<|end|>", "<|start|>"]
SIZES = {
    "vocab_size": 300, "hidden_size": 96, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 32,
    "max_position_embeddings": 128, "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
}  # fmt: skip


def trained_pieces() -> tuple[list[str], list[str]]:
    """The pieces and merges of a small byte-level BPE; special tokens come last, as in Llama 3."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = SIZES["vocab_size"] - len(SPECIAL)
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS * 3, trainer)
    model = json.loads(tokenizer.to_str())["model"]
    pieces = sorted(model["vocab"], key=model["vocab"].get)
    assert len(pieces) == size
    return [*pieces, *SPECIAL], [" ".join(pair) for pair in model["merges"]]


PIECES, MERGES = trained_pieces()


def random_transformer(model_type: str, seed: int = 0, **changes: Any) -> Any:
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}[model_type]
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(kind(**{**SIZES, **changes}), dtype=torch.float32)
    for parameter in model.parameters():
        parameter.data.normal_(0.0, 0.3)
    return model.eval()


def write_gguf(
    path: Path,
    model: Any,
    *,
    architecture: str | None = None,
    pre: str = "gpt-2",
    quantize: TensorType = TensorType.F32,
    change: Callable[[gguf.GGUFWriter], None] | None = None,
    skip: tuple[str, ...] = (),
) -> Path:
    """Write a transformers model as llama.cpp's converter does. skip: keys and tensors to omit."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture or config.model_type)
    prefix = writer.arch
    for key, value in {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.key_length": SIZES["head_dim"],
        "attention.value_length": SIZES["head_dim"],
        "rope.dimension_count": SIZES["head_dim"],
    }.items():
        if key not in skip:
            writer.add_uint32(f"{prefix}.{key}", value)
    writer.add_float32(f"{prefix}.rope.freq_base", SIZES["rope_theta"])
    writer.add_float32(f"{prefix}.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(PIECES)
    writer.add_token_types([1] * (len(PIECES) - len(SPECIAL)) + [3] * len(SPECIAL))
    writer.add_token_merges(MERGES)
    writer.add_eos_token_id(PIECES.index("<|end|>"))
    writer.add_bos_token_id(PIECES.index("<|start|>"))
    writer.add_add_bos_token(False)
    if change:
        change(writer)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        values = tensor.float().numpy()
        if config.model_type == "llama" and ("q_proj" in name or "k_proj" in name):
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            halves = values.reshape(heads, 2, values.shape[0] // heads // 2, *values.shape[1:])
            values = halves.swapaxes(1, 2).reshape(values.shape)
        short = gguf_name(name)
        if short in skip:
            continue
        kind = quantize if values.ndim == 2 else TensorType.F32
        data = gguf.quants.quantize(np.ascontiguousarray(values), kind)
        writer.add_tensor(short, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def gguf_name(name: str) -> str:
    fixed = {
        "model.embed_tokens.weight": "token_embd.weight",
        "model.norm.weight": "output_norm.weight",
        "lm_head.weight": "output.weight",
    }
    if name in fixed:
        return fixed[name]
    _, _, layer, rest = name.split(".", 3)
    module, kind = rest.rsplit(".", 1)
    return f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(
    ("model_type", "changes"),
    [
        ("llama", {}),
        ("llama", {"attention_bias": True, "mlp_bias": True}),
        ("qwen2", {}),
        ("qwen3", {}),
    ],
)
def test_config_and_tensors_come_back(
    tmp_path: Path, model_type: str, changes: dict[str, Any], tied: bool
) -> None:
    model = random_transformer(model_type, tie_word_embeddings=tied, **changes)
    ours = GGUFModel(write_gguf(tmp_path / "m.gguf", model))
    tensors = dict(ours.tensors())
    expected = model.state_dict()
    if tied:
        expected.pop("lm_head.weight")
    assert len(tensors) == ours.num_tensors
    assert tensors.keys() == expected.keys()
    assert all(torch.equal(tensors[name], expected[name]) for name in expected)

    (tmp_path / "config.json").write_text(json.dumps(ours.config))
    config = type(model.config).from_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    again.load_state_dict(tensors, strict=not tied)
    ids = torch.arange(20)[None] * 7
    assert torch.equal(again.eval()(ids).logits, model(ids).logits)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3"])
def test_transformers_reads_the_same_tensors_from_the_file(tmp_path: Path, model_type: str) -> None:
    model = random_transformer(model_type)
    path = write_gguf(tmp_path / "m.gguf", model, quantize=TensorType.Q4_1)
    theirs = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    ours = dict(GGUFModel(path).tensors())
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_every_type_of_tensor_comes_back_near_the_original(tmp_path: Path, kind: str) -> None:
    model = random_transformer("llama")
    path = write_gguf(tmp_path / "m.gguf", model, quantize=TensorType[kind])
    bits = {"F16": 11, "BF16": 8, "Q4_0": 3, "Q4_1": 4, "Q5_0": 4, "Q5_1": 5, "Q8_0": 7}[kind]
    for name, tensor in GGUFModel(path).tensors():
        original = model.state_dict()[name]
        assert tensor.dtype == torch.float32
        assert (tensor - original).abs().max() <= original.abs().max() / 2**bits, name


def test_a_q4_1_weight_is_scale_times_code_plus_minimum(tmp_path: Path) -> None:
    model = random_transformer("qwen3")
    path = write_gguf(tmp_path / "m.gguf", model, quantize=TensorType.Q4_1)
    name = "model.layers.1.mlp.up_proj.weight"
    blocks = gguf.quants.quantize(model.state_dict()[name].numpy(), TensorType.Q4_1)
    blocks = blocks.reshape(-1, 20)  # 2 bytes d, 2 bytes m, 16 bytes with 32 codes
    d, m = blocks[:, :2].copy().view("<f2"), blocks[:, 2:4].copy().view("<f2")
    codes = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
    expected = d.astype(np.float32) * codes + m.astype(np.float32)
    actual = dict(GGUFModel(path).tensors())[name]
    assert np.array_equal(actual.numpy().reshape(-1, 32), expected)


# Tokenizers ------------------------------------------------------------------------------------


def texts() -> list[str]:
    rng = random.Random(0)
    parts = [
        *"aé 中1२½\t\n\r!_",
        "  ",
        "don't",
        "I'LL",
        " the",
        "123456",
        "<|end|>",
        "\u0301",
        "😀",
    ]
    return ["".join(rng.choices(parts, k=rng.randint(0, 12))) for _ in range(300)]


@pytest.mark.parametrize(("pre", "oracle"), [("gpt-2", GPT2Tokenizer), ("qwen2", Qwen2Tokenizer)])
def test_a_named_pre_tokenizer_cuts_like_its_model(tmp_path: Path, pre: str, oracle: Any) -> None:
    model = GGUFModel(write_gguf(tmp_path / "m.gguf", random_transformer("llama"), pre=pre))
    ours = tokenizers.Tokenizer.from_str(json.dumps(model.tokenizer_json))
    vocab = {piece: i for i, piece in enumerate(PIECES)}
    special = {"eos_token": SPECIAL[0], "bos_token": SPECIAL[1], "unk_token": SPECIAL[0]}
    merges = [tuple(merge.split(" ")) for merge in MERGES]
    theirs = oracle(vocab=vocab, merges=merges, pad_token=SPECIAL[0], **special)
    for text in texts():
        ids = ours.encode(text).ids
        assert ids == theirs(text).input_ids, repr(text)
        assert ours.decode(ids, skip_special_tokens=False) == theirs.decode(ids), repr(text)


def test_llama_bpe_cuts_with_llama_3s_expression() -> None:
    pattern = inspect.signature(TikTokenConverter.__init__).parameters["pattern"].default
    assert PRE_TOKENIZERS["llama-bpe"][0]["pattern"] == {"Regex": pattern}


@pytest.mark.parametrize(
    ("model_type", "pre"),
    [("llama", "smollm"), ("llama", "llama-bpe"), ("qwen2", "qwen2"), ("qwen3", "qwen2")],
)
def test_auto_tokenizer_keeps_the_pre_tokenizer(tmp_path: Path, model_type: str, pre: str) -> None:
    """transformers has classes for these models that would build a pre-tokenizer of their own."""
    path = write_gguf(tmp_path / "m.gguf", random_transformer(model_type), pre=pre)
    model = GGUFModel(path)
    for name in ("config", "tokenizer", "tokenizer_config"):
        content = model.tokenizer_json if name == "tokenizer" else getattr(model, name)
        (tmp_path / f"{name}.json").write_text(json.dumps(content))
    ours = tokenizers.Tokenizer.from_str(json.dumps(model.tokenizer_json))
    theirs = AutoTokenizer.from_pretrained(tmp_path)
    assert (theirs.eos_token, theirs.bos_token) == tuple(SPECIAL)
    for text in texts():
        assert ours.encode(text).ids == theirs(text).input_ids, repr(text)


@pytest.mark.parametrize(("bos", "eos"), [(True, False), (False, True), (True, True)])
def test_a_file_may_want_tokens_around_a_text(tmp_path: Path, bos: bool, eos: bool) -> None:
    def change(writer: gguf.GGUFWriter) -> None:
        writer.kv_data[0]["tokenizer.ggml.add_bos_token"].value = bos
        writer.add_add_eos_token(eos)

    path = write_gguf(tmp_path / "m.gguf", random_transformer("llama"), change=change)
    tokenizer = tokenizers.Tokenizer.from_str(json.dumps(GGUFModel(path).tokenizer_json))
    start, end = [PIECES.index("<|start|>")] * bos, [PIECES.index("<|end|>")] * eos
    plain = tokenizer.encode("cat", add_special_tokens=False).ids
    assert tokenizer.encode("cat").ids == start + plain + end


def test_the_ends_of_a_text_and_of_a_turn_both_stop_a_model(tmp_path: Path) -> None:
    path = write_gguf(
        tmp_path / "m.gguf", random_transformer("llama"), change=lambda w: w.add_eot_token_id(5)
    )
    model = GGUFModel(path)
    expected = [PIECES.index("<|end|>"), 5]
    assert model.generation_config["eos_token_id"] == model.config["eos_token_id"] == expected


# Refusals --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"architecture": "gemma3"}, "architecture must be one of .* got 'gemma3'"),
        ({"pre": "deepseek-r1-qwen"}, "tokenizer.ggml.pre must be .* got 'deepseek-r1-qwen'"),
        ({"change": lambda w: w.add_expert_count(8)}, "llama.expert_count: not supported"),
        ({"change": lambda w: w.add_rope_scaling_factor(8.0)}, "llama.rope.scaling.factor"),
        (
            {"change": lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN)},
            "llama.rope.scaling.type must be 'none', got 'yarn'",
        ),
        ({"change": lambda w: w.add_sliding_window(64)}, "llama.attention.sliding_window"),
        (
            {"change": lambda w: w.add_tensor("rope_freqs.weight", np.ones(16, np.float32))},
            "tensor rope_freqs.weight is not supported",
        ),
        ({"skip": ("blk.1.ffn_up.weight",)}, "tensor blk.1.ffn_up.weight is missing"),
        ({"skip": ("context_length",)}, "llama.context_length must be an integer >= 1, got None"),
        ({"skip": ("attention.key_length",)}, "llama.attention.value_length must be the head size"),
        ({"change": lambda w: w.add_pad_token_id(300)}, "padding_token_id must be an id below 300"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    path = write_gguf(tmp_path / "m.gguf", random_transformer("llama"), **options)
    with pytest.raises(ValueError, match=reason) as caught:
        GGUFModel(path)
    assert str(path) in str(caught.value)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_gguf(path, random_transformer("llama"), quantize=TensorType.Q8_0).read_bytes()


def test_a_file_cut_short_anywhere_is_refused(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "cut.gguf"
    lengths = [0, 1, 4, 23, 24, 25, len(whole) // 2, len(whole) - 32]
    rng = random.Random(0)
    for length in lengths + [rng.randrange(len(whole)) for _ in range(100)]:
        path.write_bytes(whole[:length])
        with pytest.raises(ValueError, match=r"cut\.gguf is not a whole GGUF file"):
            GGUFModel(path)


@pytest.mark.filterwarnings("ignore:.* encountered in:RuntimeWarning")  # damaged numbers
def test_a_damaged_header_is_read_or_refused_and_nothing_else(tmp_path: Path, whole: bytes) -> None:
    path = tmp_path / "damaged.gguf"
    rng = random.Random(0)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        for _ in range(rng.randint(1, 4)):
            damaged[rng.randrange(len(whole) // 8)] = rng.choice([0, 1, 255, rng.randrange(256)])
        path.write_bytes(damaged)
        try:
            list(GGUFModel(path).tensors())
        except ValueError as error:
            refused += 1
            assert "damaged.gguf" in str(error)
    assert refused > 30


def test_a_count_beyond_the_file_is_refused_before_it_costs_anything(
    tmp_path: Path, whole: bytes
) -> None:
    path = tmp_path / "huge.gguf"
    tokens = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens") + 8
    for position in (8, 16, tokens):  # tensors, values, tokens
        path.write_bytes(whole[:position] + (2**60).to_bytes(8, "little") + whole[position + 8 :])
        with pytest.raises(ValueError, match=r"huge\.gguf is not a whole GGUF file"):
            GGUFModel(path)


def test_another_file_is_not_taken_for_gguf(tmp_path: Path) -> None:
    path = tmp_path / "model.gguf"
    path.write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ValueError, match="does not begin with 'GGUF'"):
        GGUFModel(path)


# The default model -----------------------------------------------------------------------------


def test_the_default_directory_holds_the_gguf_rounded_to_bfloat16(default_dir: Path) -> None:
    (path,) = default_dir.glob("*.gguf")
    stored = load_file(default_dir / "model.safetensors")
    model = GGUFModel(path)
    assert len(stored) == model.num_tensors == 272
    assert "lm_head.weight" not in stored
    for name, tensor in model.tensors():
        assert torch.equal(stored[name], tensor.to(torch.bfloat16)), name
    assert json.loads((default_dir / "config.json").read_text()) == model.config
    assert model.config["rope_theta"] == 100_000.0
    assert model.config["rms_norm_eps"] == 1e-5
    assert model.generation_config["eos_token_id"] == 2


def test_transformers_answers_paris_from_the_default_directory(default_dir: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(default_dir)
    model = AutoModelForCausalLM.from_pretrained(default_dir, dtype=torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    inputs = tokenizer(text, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs.input_ids.shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
