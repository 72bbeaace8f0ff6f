"""Solutions of chapter @NUMBER@'s exercises. Try first: the checks tell you what is missing."""

# mypy: ignore-errors


def cache_lengths(prompt_tokens, new_tokens):
    # Prefill leaves the prompt. Each later step feeds the token chosen before it, so the token
    # that the last step chooses never gets in.
    return [prompt_tokens + i for i in range(new_tokens)]


def cache_bytes(num_tokens, num_layers, num_kv_heads, head_size, bytes_per_number):
    # A key and a value (hence the 2) for each KV head of each layer. Queries aren't kept.
    return 2 * num_tokens * num_layers * num_kv_heads * head_size * bytes_per_number


def next_token(logits):
    # Row t says what follows token t, so the last row decides. `argmax` takes the lowest of
    # equals; `int` takes the number out of its tensor.
    return int(logits[-1].argmax())
