"""What a model is, in numbers: the frozen `ModelConfig`, read from a Hugging Face `config.json`.

Four architectures share one decoder and differ in a few switches:

    llama    the plain decoder; biases where the config says so
    mistral  llama without biases
    qwen2    biases on q, k and v
    qwen3    RMSNorm on every query and key head

Whatever else a config asks for (another architecture, RoPE type, activation, a sliding window in
use, quantized weights) is refused by name: computing it as if it were llama would give wrong text.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("llama", "mistral", "qwen2", "qwen3")
ROPE_TYPES = ("default", "linear", "llama3")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding: base `theta`, and how long contexts scale its frequencies.

    `linear` divides every frequency by `factor`; `llama3` divides the slow ones only, those whose
    wavelength exceeds `original_max_position / low_freq_factor` tokens (Llama 3.1 model card).
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192

    @classmethod
    def from_dict(cls, config: dict[str, Any]) -> RopeConfig:
        """Read `rope_parameters` (transformers 5) or `rope_theta` with `rope_scaling` (before)."""
        rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
        for name in _ROPE_NUMBERS & rope.keys():
            if rope[name] is not None:
                _check_number(rope, name)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind not in ROPE_TYPES:
            raise ValueError(f"rope_type {kind!r} is not supported; allowed: {_names(ROPE_TYPES)}")
        partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
        if partial != 1.0:
            raise ValueError(f"partial_rotary_factor {partial} is not supported; allowed: 1.0")
        theta = float(rope.get("rope_theta", config.get("rope_theta")) or 10000.0)
        if kind == "default":
            return cls(theta=theta)
        if rope.get("factor") is None:
            raise ValueError(f"rope_type {kind!r} needs a factor, got {rope}")
        if kind == "linear":
            return cls(theta=theta, kind=kind, factor=float(rope["factor"]))
        try:
            return cls(
                theta=theta,
                kind=kind,
                factor=float(rope["factor"]),
                low_freq_factor=float(rope["low_freq_factor"]),
                high_freq_factor=float(rope["high_freq_factor"]),
                original_max_position=int(rope["original_max_position_embeddings"]),
            )
        except KeyError as missing:
            raise ValueError(f"rope_type 'llama3' needs {missing}, got {rope}") from None


@dataclass(frozen=True)
class ModelConfig:
    """The sizes and switches of a decoder-only transformer; see `from_pretrained`."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position_embeddings: int = 2048
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    def __post_init__(self) -> None:
        sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads")
        for name in (*sizes, "num_kv_heads", "head_size", "max_position_embeddings"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads must be a multiple of num_kv_heads,"
                f" got {self.num_heads} and {self.num_kv_heads}"
            )
        if self.head_size % 2:
            raise ValueError(f"head_size must be even (RoPE turns pairs), got {self.head_size}")

    @classmethod
    def from_pretrained(cls, directory: str | Path) -> ModelConfig:
        """Read `config.json`, and `generation_config.json` if there is one, from a directory.

        Raises ValueError when `config.json` is missing, unreadable or asks for something that this
        library does not compute.
        """
        directory = Path(directory)
        config = read_json(directory / "config.json")
        generation_path = directory / "generation_config.json"
        generation = read_json(generation_path) if generation_path.is_file() else None
        return cls.from_dict(config, generation)

    @classmethod
    def from_dict(
        cls, config: dict[str, Any], generation_config: dict[str, Any] | None = None
    ) -> ModelConfig:
        """Translate a Hugging Face config. Raises ValueError for what is not supported."""
        architecture = config.get("model_type")
        if architecture not in ARCHITECTURES:
            raise ValueError(
                f"model_type {architecture!r} is not supported; allowed: {_names(ARCHITECTURES)}"
            )
        _check_kinds(config)
        _refuse_unsupported(config, architecture)
        num_heads = _require(config, "num_attention_heads")
        hidden_size = _require(config, "hidden_size")
        attention_bias = bool(config.get("attention_bias", False))
        return cls(
            architecture=architecture,
            vocab_size=_require(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_require(config, "intermediate_size"),
            num_layers=_require(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=config.get("num_key_value_heads") or num_heads,
            head_size=config.get("head_dim") or hidden_size // max(num_heads, 1),
            max_position_embeddings=config.get("max_position_embeddings") or 2048,
            rms_norm_eps=config.get("rms_norm_eps") or 1e-6,
            rope=RopeConfig.from_dict(config),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=architecture == "qwen2" or (architecture != "mistral" and attention_bias),
            output_bias=architecture in ("llama", "qwen3") and attention_bias,
            mlp_bias=architecture == "llama" and bool(config.get("mlp_bias", False)),
            qk_norm=architecture == "qwen3",
            eos_token_ids=eos_ids(generation_config) or eos_ids(config),
            dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        )


def eos_ids(config: dict[str, Any] | None) -> tuple[int, ...]:
    """The end-of-sequence ids of a config, which may hold one number, a list or none."""
    value = (config or {}).get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    if not all(isinstance(each, int) and not isinstance(each, bool) for each in ids):
        raise ValueError(f"eos_token_id must be a token id or a list of them, got {value!r}")
    return tuple(ids)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ValueError that names the file when it is not one."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ValueError(f"{path} does not exist; is {path.parent} a model directory?") from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(value, dict):
        raise ValueError(f"{path} must hold a JSON object, got {type(value).__name__}")
    return value


# What a config may leave out (or set to null), and what it must be if it is there.
_OPTIONAL_SIZES = ("num_key_value_heads", "head_dim", "max_position_embeddings", "sliding_window")
_ROPE_NUMBERS = {
    "rope_theta", "factor", "low_freq_factor", "high_freq_factor",
    "original_max_position_embeddings",
}  # fmt: skip
_CONTAINERS = {
    "rope_scaling": dict, "rope_parameters": dict, "quantization_config": dict, "layer_types": list,
}  # fmt: skip


def _check_kinds(config: dict[str, Any]) -> None:
    for name in _OPTIONAL_SIZES:
        if config.get(name) is not None:
            _require(config, name)
    for name in ("rms_norm_eps", "rope_theta"):
        if config.get(name) is not None:
            _check_number(config, name)
    for name, kind in _CONTAINERS.items():
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name} must be a {kind.__name__}, got {value!r}")


def _check_number(config: dict[str, Any], name: str) -> None:
    value = config[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not (is_number and 0 < value < math.inf):
        raise ValueError(f"{name} must be a number > 0, got {value!r}")


def _refuse_unsupported(config: dict[str, Any], architecture: str) -> None:
    if (activation := config.get("hidden_act", "silu")) != "silu":
        raise ValueError(f"hidden_act {activation!r} is not supported; allowed: 'silu'")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        raise ValueError(f"quantization_config {method!r} is not supported; use plain weights")
    if "sliding_attention" in (config.get("layer_types") or ()):
        raise ValueError("layer_types 'sliding_attention' is not supported; use full attention")
    window = config.get("sliding_window")
    in_use = architecture == "mistral" or config.get("use_sliding_window", False)
    if window and in_use and window < (config.get("max_position_embeddings") or 2048):
        raise ValueError(f"sliding_window {window} is in use, which is not supported")


def _require(config: dict[str, Any], name: str) -> int:
    value = config.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"config.json must give {name} as a number, got {value!r}")
    return value


def _names(allowed: tuple[str, ...]) -> str:
    return ", ".join(map(repr, allowed))
