"""A GGUF file said in Hugging Face's words: a config, a tokenizer, and tensors under its names.

    GGUF                                Hugging Face
    llama.embedding_length = 576        config["hidden_size"] = 576
    tokenizer.ggml.merges               tokenizer_json["model"]["merges"]
    blk.0.attn_q.weight (Q4_1)          model.layers.0.self_attn.q_proj.weight (float32)

The file is data and nothing in it is executed. What this module does not understand (an
architecture, a RoPE scaling, a tensor) is refused by name, because ignoring it would compute
something wrong. `gguf_reader` holds the layout of the file, `gguf_tokenizer` the tokenizer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from infer_lab.model.gguf_reader import GGUFFile
from infer_lab.model.gguf_tokenizer import special_id, tokenizer_config, tokenizer_json

if TYPE_CHECKING:
    import torch

ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}

# Everything an `<architecture>.` key may say without changing what the model computes, or that
# `GGUFModel` reads. Any other key (experts, soft caps, RoPE scaling ...) is refused.
KNOWN_KEYS = {
    "attention.head_count",
    "attention.head_count_kv",
    "attention.key_length",
    "attention.layer_norm_rms_epsilon",
    "attention.value_length",
    "block_count",
    "context_length",
    "embedding_length",
    "feed_forward_length",
    "rope.dimension_count",
    "rope.freq_base",
    "rope.scaling.type",  # "none" only
    "vocab_size",
}

# Hugging Face's names of the parts of a layer, and GGUF's.
LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


class GGUFModel:
    """One model file.

    Attributes:
        path: the file.
        config: what Hugging Face keeps in `config.json`.
        generation_config: `generation_config.json` (the end-of-sequence ids).
        tokenizer_json: `tokenizer.json`, as the `tokenizers` library reads it.
        tokenizer_config: `tokenizer_config.json` (special tokens by role, chat template).

    Raises:
        ValueError: the file is not a whole GGUF file, or it holds something unsupported. The
            message names the file.
    """

    config: dict[str, Any]
    generation_config: dict[str, Any]
    tokenizer_json: dict[str, Any]
    tokenizer_config: dict[str, Any]

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            self._file = GGUFFile(self.path)
        except ValueError as error:
            raise ValueError(f"{self.path} is not a whole GGUF file: {error}") from error
        try:
            self._metadata, self._tensors = self._file.metadata, self._file.tensors
            self._read_config()
            self._expected = self._expected_tensors()
            self._check_tensors()
            self.tokenizer_json = tokenizer_json(self._metadata)
            max_length = self.config["max_position_embeddings"]
            self.tokenizer_config = tokenizer_config(self._metadata, max_length)
            self._read_special_ids()
            num_tokens = len(self._metadata["tokenizer.ggml.tokens"])
            if num_tokens != self.config["vocab_size"]:
                raise ValueError(
                    f"{num_tokens} tokens for an embedding of {self.config['vocab_size']} rows"
                )
        except ValueError as error:
            raise ValueError(f"{self.path} cannot be used: {error}") from error

    @property
    def num_tensors(self) -> int:
        """How many tensors `tensors()` yields."""
        return len(self._expected)

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Each tensor in turn, dequantized: (Hugging Face name, float32 tensor (rows, columns)).

        An output head that is tied to the embedding is not listed.
        """
        import torch

        heads, kv_heads = self.config["num_attention_heads"], self.config["num_key_value_heads"]
        for name, (hf_name, _) in self._expected.items():
            values = self._file.tensor(name)
            if self.config["model_type"] == "llama" and ".self_attn.q_proj." in hf_name:
                values = _unpermute(values, heads)
            if self.config["model_type"] == "llama" and ".self_attn.k_proj." in hf_name:
                values = _unpermute(values, kv_heads)
            yield hf_name, torch.from_numpy(np.ascontiguousarray(values))

    # What the metadata means -----------------------------------------------------------------

    def _read_config(self) -> None:
        architecture = str(self._metadata.get("general.architecture"))
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"architecture must be one of {', '.join(ARCHITECTURES)}, got {architecture!r}"
            )
        if "token_embd.weight" not in self._tensors:
            raise ValueError("tensor token_embd.weight is missing")
        values = _ArchitectureValues(architecture, self._metadata)
        hidden, heads = values.integer("embedding_length"), values.integer("attention.head_count")
        kv_heads = values.integer("attention.head_count_kv", heads)
        head_size = values.integer("attention.key_length", hidden // heads)
        for key in ("attention.value_length", "rope.dimension_count"):
            if values.integer(key, head_size) != head_size:
                raise ValueError(f"{architecture}.{key} must be the head size, {head_size}")
        if heads % kv_heads or head_size % 2:
            raise ValueError(
                f"{heads} query heads must share {kv_heads} KV heads evenly, and the head size "
                f"{head_size} must be even"
            )
        num_layers = values.integer("block_count")
        if num_layers > len(self._tensors):
            raise ValueError(f"{num_layers} layers, but only {len(self._tensors)} tensors")
        self.config = {
            "architectures": [ARCHITECTURES[architecture]],
            "model_type": architecture,
            "vocab_size": self._tensors["token_embd.weight"].shape[0],
            "hidden_size": hidden,
            "intermediate_size": values.integer("feed_forward_length"),
            "num_hidden_layers": num_layers,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_size,
            "hidden_act": "silu",
            "max_position_embeddings": values.integer("context_length"),
            "rms_norm_eps": values.real("attention.layer_norm_rms_epsilon"),
            "rope_theta": values.real("rope.freq_base", 10000.0),
            "rope_scaling": None,
            "attention_bias": "blk.0.attn_q.bias" in self._tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "torch_dtype": "bfloat16",
        }

    def _read_special_ids(self) -> None:
        """Special tokens, for both configs. A chat model may end a turn otherwise than a text."""
        ids = {
            role: special_id(self._metadata, role) for role in ("bos", "eos", "eot", "eom", "pad")
        }
        ends = [ids[role] for role in ("eos", "eot", "eom") if ids[role] is not None]
        ends = list(dict.fromkeys(ends))
        found = {"bos": ids["bos"], "eos": ends[0] if len(ends) == 1 else ends, "pad": ids["pad"]}
        self.generation_config = {
            f"{role}_token_id": value for role, value in found.items() if value not in (None, [])
        }
        self.config.update(self.generation_config)

    def _expected_tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """GGUF name -> (Hugging Face name, shape) for every tensor that the config calls for."""
        c = self.config
        hidden, inner, head = c["hidden_size"], c["intermediate_size"], c["head_dim"]
        q_rows, kv_rows = c["num_attention_heads"] * head, c["num_key_value_heads"] * head
        vocab = c["vocab_size"]
        qwen2, qwen3 = c["model_type"] == "qwen2", c["model_type"] == "qwen3"
        shapes: dict[str, tuple[int, ...]] = {
            "input_layernorm.weight": (hidden,),
            "self_attn.q_proj.weight": (q_rows, hidden),
            "self_attn.k_proj.weight": (kv_rows, hidden),
            "self_attn.v_proj.weight": (kv_rows, hidden),
            "self_attn.o_proj.weight": (hidden, q_rows),
            "post_attention_layernorm.weight": (hidden,),
            "mlp.gate_proj.weight": (inner, hidden),
            "mlp.up_proj.weight": (inner, hidden),
            "mlp.down_proj.weight": (hidden, inner),
        }
        if qwen3:
            shapes |= {"self_attn.q_norm.weight": (head,), "self_attn.k_norm.weight": (head,)}
        biased = ["q", "k", "v"] if qwen2 else ["q", "k", "v", "o"] if c["attention_bias"] else []
        for part in biased:
            shapes[f"self_attn.{part}_proj.bias"] = shapes[f"self_attn.{part}_proj.weight"][:1]
        for part in ("gate", "up", "down") if c["mlp_bias"] else ():
            shapes[f"mlp.{part}_proj.bias"] = shapes[f"mlp.{part}_proj.weight"][:1]

        names: dict[str, tuple[str, tuple[int, ...]]] = {
            "token_embd.weight": ("model.embed_tokens.weight", (vocab, hidden))
        }
        for layer in range(c["num_hidden_layers"]):
            for part, shape in shapes.items():
                module, kind = part.rsplit(".", 1)
                names[f"blk.{layer}.{LAYER_NAMES[module]}.{kind}"] = (
                    f"model.layers.{layer}.{part}", shape,
                )  # fmt: skip
        names["output_norm.weight"] = ("model.norm.weight", (hidden,))
        if not c["tie_word_embeddings"]:
            names["output.weight"] = ("lm_head.weight", (vocab, hidden))
        return names

    def _check_tensors(self) -> None:
        for name, (_, shape) in self._expected.items():
            if name not in self._tensors:
                raise ValueError(f"tensor {name} is missing")
            if self._tensors[name].shape != shape:
                raise ValueError(
                    f"tensor {name} must have shape {shape}, got {self._tensors[name].shape}"
                )
        for name in self._tensors.keys() - self._expected.keys():
            raise ValueError(f"tensor {name} is not supported")


class _ArchitectureValues:
    """The `<architecture>.` part of the metadata, each value checked when it is read."""

    def __init__(self, architecture: str, metadata: dict[str, Any]) -> None:
        self._prefix = f"{architecture}."
        self._values = metadata
        keys = {key for key in metadata if key.startswith(self._prefix)}
        unknown = keys - {self._prefix + key for key in KNOWN_KEYS}
        if unknown:
            raise ValueError(f"{', '.join(sorted(unknown))}: not supported")
        scaling = metadata.get(f"{self._prefix}rope.scaling.type", "none")
        if scaling != "none":
            raise ValueError(f"{self._prefix}rope.scaling.type must be 'none', got {scaling!r}")

    def integer(self, key: str, default: int | None = None) -> int:
        value = self._values.get(self._prefix + key, default)
        if type(value) is not int or value < 1:
            raise ValueError(f"{self._prefix}{key} must be an integer >= 1, got {value!r}")
        return value

    def real(self, key: str, default: float | None = None) -> float:
        value = self._values.get(self._prefix + key, default)
        if not isinstance(value, float) or not 0 < value < math.inf:
            raise ValueError(f"{self._prefix}{key} must be a number > 0, got {value!r}")
        return float(str(np.float32(value)))  # 1e-05, not 9.999999747378752e-06


def _unpermute(values: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Put the rows of a llama query or key projection back into Hugging Face's order.

    RoPE rotates pairs of values. Hugging Face pairs value i of a head with value i + D/2; llama.cpp
    pairs neighbours (2i, 2i + 1), and for the llama architecture its converter reorders the rows of
    q and k to suit. Qwen files keep Hugging Face's order.
    """
    rows = values.shape[0]
    pairs = values.reshape(heads, rows // heads // 2, 2, *values.shape[1:])  # (heads, D/2, 2, H)
    return pairs.swapaxes(1, 2).reshape(values.shape)
