"""What `infer-lab demo` prints: one chat prompt, followed from text to text.

question -> chat template -> ids -> prefill -> token -> decode -> token ... -> answer
"""

from __future__ import annotations

from pathlib import Path

from infer_lab.decode import generate_tokens
from infer_lab.kv_cache import CacheSpec, ContiguousKVCache
from infer_lab.model.load import load_model
from infer_lab.tokenize import Tokenizer
from infer_lab.trace import Trace

MAX_TOKENS = 32


def run(
    question: str,
    *,
    name_or_path: str | Path | None = None,
    device: str = "auto",
    dtype: str = "auto",
) -> str:
    """Print every stage of answering `question`; returns the answer.

    Raises ValueError for a model, device or dtype that is not to be had.
    """
    tokenizer = Tokenizer.from_pretrained(name_or_path)
    model = load_model(name_or_path, device=device, dtype=dtype)
    spec = CacheSpec.from_config(model.config, model.dtype)

    _title("1. A question becomes the text that the model was trained to continue")
    text = tokenizer.apply_chat_template([{"role": "user", "content": question}])
    print(_indent(text))

    _title("2. The text becomes token ids, one for each piece")
    prompt_ids = tokenizer.encode(text, add_special_tokens=False)
    print(_wrapped([f"{piece!r}:{i}" for piece, i in _pieces(tokenizer, prompt_ids)]))
    print(f"\n  {len(text)} characters, {len(prompt_ids)} tokens")

    _title("3. Prefill reads all of them at once; decode then adds one token at a time")
    dtype_name = str(model.dtype).removeprefix("torch.")
    print(f"  model   {model.config.num_layers} layers, {dtype_name} on {model.device}")
    print(
        f"  cache   {spec.bytes_per_token:,} bytes a token = 2 (key, value) x {spec.num_layers}"
        f" layers x {spec.num_kv_heads} heads x {spec.head_size} numbers"
        f" x {spec.dtype.itemsize} bytes\n"
    )
    cache = ContiguousKVCache(spec, len(prompt_ids) + MAX_TOKENS, model.device)
    trace = Trace()
    answer_ids = []
    for token_id in generate_tokens(model, prompt_ids, cache, max_tokens=MAX_TOKENS, trace=trace):
        answer_ids.append(token_id)
        record = trace.records[-1]
        print(
            f"  {record.phase:<8}{record.tokens_in:>3} in, {1e3 * record.seconds:6.1f} ms"
            f"  ->  {tokenizer.pieces([token_id])[0]!r}"
        )

    _title("4. What each step took and kept: the cache grows as predicted, to the byte")
    print(_indent(trace.table()))
    if any(r.predicted_bytes != r.measured_bytes for r in trace.records):
        raise AssertionError("the cache's size differs from the prediction")

    _title("5. The answer")
    answer = tokenizer.decode(answer_ids)
    print(_indent(answer))
    return answer


def _pieces(tokenizer: Tokenizer, ids: list[int]) -> list[tuple[str, int]]:
    return list(zip(tokenizer.pieces(ids), ids, strict=True))


def _title(text: str) -> None:
    print(f"\n{text}\n")


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _wrapped(words: list[str], width: int = 90) -> str:
    """Words in lines of at most `width` characters; a word may hold spaces and stays whole."""
    lines = [""]
    for word in words:
        if len(lines[-1]) + len(word) > width:
            lines.append("")
        lines[-1] += f"  {word}"
    return "\n".join(lines)
