"""From files to a `Transformer`: the default model, a Hugging Face directory, a hub id or a GGUF.

The files name q, k and v apart, and gate and up; our model keeps each group in one matrix, so that
one product does the work of several. Loading is copying each tensor into its rows. Weights come
from safetensors or GGUF only: they are data, and nothing in them is ever run.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from infer_lab.model.config import ModelConfig, read_json
from infer_lab.model.fetch import resolve
from infer_lab.model.gguf import GGUFModel
from infer_lab.model.transformer import Transformer

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

# Hugging Face name -> ours. The part after "self_attn." or "mlp." is mapped below.
_RENAMED = {
    "model.embed_tokens": "embed_tokens",
    "model.norm": "norm",
    "lm_head": "lm_head",
    "input_layernorm": "input_norm",
    "post_attention_layernorm": "post_attention_norm",
    "self_attn": "attention",
}
_FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj"} | {
    "gate_proj": "gate_up_proj",
    "up_proj": "gate_up_proj",
}


def load_model(
    name_or_path: str | Path | None = None,
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
) -> Transformer:
    """Load weights and return a model ready to run (no gradients).

    name_or_path: None for $INFER_LAB_MODEL or else the default model (fetched once), a directory
        with `config.json` and safetensors, a `.gguf` file, or a hub id such as "org/name".
    device: "auto" is CUDA where there is one, else the CPU; otherwise a torch device.
    dtype: "auto" is bfloat16 where the device computes in it natively, else float32.

    Raises ValueError for files or settings that are wrong or not supported.
    """
    device = pick_device(device)
    dtype = pick_dtype(dtype, device)
    path = resolve(name_or_path)
    if path.suffix == ".gguf":
        gguf = GGUFModel(path)
        config = ModelConfig.from_dict(gguf.config, gguf.generation_config)
        tensors: Iterable[tuple[str, Tensor]] = gguf.tensors()
    else:
        config = ModelConfig.from_pretrained(path)
        tensors = _safetensors(path)
    model = _empty_model(config, device, dtype)
    _copy_weights(model, tensors, path)
    return model.requires_grad_(False).eval()


def _empty_model(config: ModelConfig, device: torch.device, dtype: torch.dtype) -> Transformer:
    """A model whose weights are memory yet to be filled."""
    with torch.device("meta"):  # shapes only: no memory, no random numbers
        model = Transformer(config)
    shapes = {name: weight.shape for name, weight in model.state_dict().items()}
    empty = {name: torch.empty(s, dtype=dtype, device=device) for name, s in shapes.items()}
    model.load_state_dict(empty, assign=True)
    if config.tie_word_embeddings:
        model.lm_head.weight = model.embed_tokens.weight
    model.reset_rope()
    return model


def pick_device(device: str | torch.device) -> torch.device:
    """A torch device from its name. Raises ValueError when it is unknown or not there."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        picked = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be 'auto' or a torch device, got {device!r}") from error
    if picked.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device {str(device)!r} asks for CUDA, which this machine does not have")
    if picked.type == "cuda" and (picked.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {str(device)!r} is not among {torch.cuda.device_count()} GPUs")
    if picked.type == "mps" and not torch.backends.mps.is_available():
        raise ValueError(f"device {str(device)!r} asks for MPS, which this machine does not have")
    return picked


def pick_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """A torch dtype from its name; "auto" asks whether the device computes in bfloat16 itself."""
    if dtype == "auto":
        return torch.bfloat16 if has_fast_bfloat16(device) else torch.float32
    name = str(dtype).removeprefix("torch.")
    if name not in DTYPES:
        raise ValueError(f"dtype must be 'auto' or one of {', '.join(DTYPES)}, got {dtype!r}")
    return DTYPES[name]


def has_fast_bfloat16(device: torch.device) -> bool:
    """Whether bfloat16 products run in hardware; emulated ones are slower than float32."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    if device.type == "cpu":
        has: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()  # newer torch only
        return any(has.get(name, False) for name in ("avx512_bf16", "amx_bf16", "arm_bf16"))
    return False


def _safetensors(directory: Path) -> Iterator[tuple[str, Tensor]]:
    """Every tensor of `model.safetensors`, or of the shards that its index names."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise ValueError(f"{index} must hold a weight_map from tensors to file names")
        files = sorted(set(weight_map.values()))
    else:
        files = ["model.safetensors"]
    for name in files:
        file = directory / name
        if Path(name).name != name or not file.is_file():
            raise ValueError(f"{file} does not exist; weights must be in safetensors format")
        try:
            with safe_open(file, framework="pt") as tensors:
                for key in tensors.keys():  # noqa: SIM118, a file handle and no dict
                    yield key, tensors.get_tensor(key)
        except SafetensorError as error:
            raise ValueError(f"{file} is not a whole safetensors file: {error}") from error


def _copy_weights(model: Transformer, tensors: Iterable[tuple[str, Tensor]], path: Path) -> None:
    """Copy every file tensor into its place; each row must be written exactly once."""
    parameters = dict(model.named_parameters())
    missing = {name: parameter.shape[0] for name, parameter in parameters.items()}
    seen: set[str] = set()
    with torch.no_grad():
        for name, tensor in tensors:
            if "rotary_emb" in name:  # old files keep a table that we compute
                continue
            if name == "lm_head.weight" and model.config.tie_word_embeddings:
                continue
            ours = _our_name(name)
            if ours not in parameters or name in seen:
                raise ValueError(f"{path}: unexpected tensor {name!r}")
            seen.add(name)
            rows = parameters[ours][_rows(model.config, name, parameters[ours].shape[0])]
            if rows.shape != tensor.shape:
                raise ValueError(
                    f"{path}: {name!r} must have shape {tuple(rows.shape)},"
                    f" got {tuple(tensor.shape)}"
                )
            rows.copy_(tensor)
            missing[ours] -= rows.shape[0]
    lacking = [name for name, rows in missing.items() if rows]
    if lacking:
        raise ValueError(f"{path}: no weights for {', '.join(lacking[:3])} ({len(lacking)} in all)")


def _our_name(name: str) -> str:
    name = name.replace("model.layers.", "layers.")
    for theirs, ours in _RENAMED.items():
        name = re.sub(rf"(^|\.){re.escape(theirs)}\.", rf"\1{ours}.", name)
    for theirs, ours in _FUSED.items():
        name = name.replace(f".{theirs}.", f".{ours}.")
    return name


def _rows(config: ModelConfig, name: str, num_rows: int) -> slice:
    """Which rows of the fused matrix (or bias) a tensor of the file fills."""
    q = config.num_heads * config.head_size
    kv = config.num_kv_heads * config.head_size
    starts = {"q_proj": (0, q), "k_proj": (q, q + kv), "v_proj": (q + kv, q + 2 * kv)}
    wide = config.intermediate_size
    starts |= {"gate_proj": (0, wide), "up_proj": (wide, 2 * wide)}
    module = name.split(".")[-2]
    return slice(*starts.get(module, (0, num_rows)))
