"""infer_lab: a language-model serving engine, short enough to be read whole.

Read it in the order of the course:

    one request     tokenize, model/, prefill, decode, kv_cache
    its tokens      sampling_params, sampler, request, text_stream
    many requests   scheduler, allocator, batcher, kernels/
    their memory    paged_cache, prefix_cache, kv_memory
    all together    engine

The names below are imported when first used, so that `import infer_lab` costs nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from infer_lab.engine import Engine
    from infer_lab.kv_cache import CacheSpec, ContiguousKVCache, NoCache
    from infer_lab.model.load import load_model
    from infer_lab.request import Completion, Delta
    from infer_lab.sampler import Sampler
    from infer_lab.sampling_params import SamplingParams
    from infer_lab.tokenize import Detokenizer, Tokenizer
    from infer_lab.trace import Trace

__version__ = "0.1.0"

_HOME = {
    "CacheSpec": "kv_cache",
    "Completion": "request",
    "ContiguousKVCache": "kv_cache",
    "Delta": "request",
    "Detokenizer": "tokenize",
    "Engine": "engine",
    "NoCache": "kv_cache",
    "Sampler": "sampler",
    "SamplingParams": "sampling_params",
    "Tokenizer": "tokenize",
    "Trace": "trace",
    "load_model": "model.load",
}

__all__ = [
    "CacheSpec",
    "Completion",
    "ContiguousKVCache",
    "Delta",
    "Detokenizer",
    "Engine",
    "NoCache",
    "Sampler",
    "SamplingParams",
    "Tokenizer",
    "Trace",
    "load_model",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'infer_lab' has no attribute {name!r}")
    return getattr(import_module(f"infer_lab.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
