"""Fixtures: small random models whose results are exact, and the default model when asked for."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from infer_lab.model.config import ModelConfig
from infer_lab.model.fetch import default_model_dir
from infer_lab.model.load import load_model
from infer_lab.model.transformer import Transformer
from infer_lab.tokenize import Tokenizer

SMALL = ModelConfig(
    architecture="llama",
    vocab_size=97,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=6,
    num_kv_heads=2,
    head_size=8,
    max_position_embeddings=512,
)


def random_model(config: ModelConfig = SMALL, seed: int = 0) -> Transformer:
    """Random weights in float64: no two tokens come near a tie, so tokens can be compared."""
    torch.manual_seed(seed)
    model = Transformer(config).to(torch.float64).eval()
    for name, parameter in model.named_parameters():
        parameter.data.normal_(1.0 if "norm" in name else 0.0, 0.3)
    return model.requires_grad_(False)


@pytest.fixture(scope="session")
def small_model() -> Transformer:
    return random_model()


@pytest.fixture(scope="session")
def default_dir() -> Path:
    return default_model_dir(progress=False)


@pytest.fixture(scope="session")
def default_model(default_dir: Path) -> Transformer:
    return load_model(default_dir, device="cpu", dtype="float32")


@pytest.fixture(scope="session")
def default_tokenizer(default_dir: Path) -> Tokenizer:
    return Tokenizer.from_pretrained(default_dir)
