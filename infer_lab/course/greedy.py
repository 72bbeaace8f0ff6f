"""Greedy examples that come out the same everywhere.

Two machines round differently in the last bits. Where the two likeliest tokens are nearly tied,
that is enough to flip the choice, and from there on the whole text. So a lesson's greedy examples
must keep a clear margin at every step. A chapter lists them in its `checks.py`:

    GREEDY = [GreedyExample("The capital of France is", max_tokens=8)]

and the tests measure every one, and that its prompt stands in the notebook.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from infer_lab.decode import generate_tokens
from infer_lab.kv_cache import CacheSpec, ContiguousKVCache
from infer_lab.model.transformer import Transformer
from infer_lab.tokenize import Tokenizer

MIN_MARGIN = 0.1  # in logits


@dataclass(frozen=True)
class GreedyExample:
    """A prompt that the lesson continues greedily; `chat` puts it into the chat template."""

    prompt: str
    max_tokens: int
    chat: bool = False

    def token_ids(self, tokenizer: Tokenizer) -> list[int]:
        """The ids that go in."""
        if self.chat:
            return tokenizer.encode_chat([{"role": "user", "content": self.prompt}])
        return tokenizer.encode(self.prompt)


def margins(model: Transformer, tokenizer: Tokenizer, example: GreedyExample) -> list[float]:
    """Per generated token: by how many logits the likeliest token beats the second."""
    found: list[float] = []

    def choose(logits: Tensor) -> int:
        first, second = logits.topk(2).values.tolist()
        found.append(first - second)
        return int(logits.argmax())

    prompt = example.token_ids(tokenizer)
    spec = CacheSpec.from_config(model.config, model.dtype)
    cache = ContiguousKVCache(spec, len(prompt) + example.max_tokens, model.device)
    list(generate_tokens(model, prompt, cache, max_tokens=example.max_tokens, choose=choose))
    return found
