"""Attention backends: what the fused one computes is what the plain loop computes."""

from __future__ import annotations

import random
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from infer_lab.batcher import Batch
from infer_lab.kernels import BACKENDS, AttentionBackend, pick_backend
from infer_lab.kernels.reference import ReferenceBackend
from infer_lab.kernels.sdpa import SMALLEST_CONTEXT, SdpaBackend

CPU = torch.device("cpu")
HEADS = {"all heads share keys": (6, 1), "three share": (6, 2), "each its own": (4, 4)}


def make_batch(
    sizes: Sequence[tuple[int, int]], block_size: int, rng: random.Random, shared: int = 0
) -> tuple[Batch, int]:
    """A batch of (queries, context) sequences with scattered blocks; the number of blocks.

    shared: the first blocks that all sequences have in common.
    """
    counts = [-(-context // block_size) for _, context in sizes]
    num_blocks = sum(counts) + shared + 3
    free = rng.sample(range(1, num_blocks), num_blocks - 1)  # block 0 is nobody's
    common = [free.pop() for _ in range(shared)]
    tables = np.zeros((len(sizes), max(counts)), dtype=np.int64)
    for row, count in zip(tables, counts, strict=True):
        row[:count] = (common + [free.pop() for _ in range(count)])[:count]
    none = torch.empty(0)
    query_lens, context_lens = (np.array(lens) for lens in zip(*sizes, strict=True))
    return Batch(
        none, none, none, none, query_lens, context_lens, tables, block_size, sampling=()
    ), num_blocks


def make_memory(
    batch: Batch, num_blocks: int, heads: int, head_size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Random keys and values in the slots of the batch's sequences, NaN in all others."""
    memory = torch.full((2, num_blocks * batch.block_size, heads, head_size), torch.nan)
    used = np.concatenate(
        [batch.token_slots(np.array(i), np.arange(n)) for i, n in enumerate(batch.context_lens)]
    )
    used = torch.from_numpy(np.unique(used))
    memory[:, used] = torch.randn(2, len(used), heads, head_size)
    keys, values = memory.to(dtype)
    return keys, values


def attend(backend: AttentionBackend, batch: Batch, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return backend.attend(q, k, v, backend.prepare(batch, q.dtype, CPU))


def random_sizes(rng: random.Random) -> list[tuple[int, int]]:
    kinds = (
        lambda: (1, rng.randint(1, 300)),  # decode
        lambda: (n := rng.randint(1, 40), n),  # a whole prompt
        lambda: (n := rng.randint(1, 40), n + rng.randint(1, 200)),  # a later chunk
        lambda: (1, 1),
        lambda: (1, SMALLEST_CONTEXT + rng.randint(-1, 1)),  # on the border of two groups
        lambda: (rng.choice([15, 16, 17]), 2 * SMALLEST_CONTEXT + rng.randint(-1, 1)),
    )
    return [rng.choice(kinds)() for _ in range(rng.randint(1, 12))]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 2e-2)],
    ids=str,
)
def test_sdpa_agrees_with_the_loop_on_ragged_batches(
    heads: str, dtype: torch.dtype, tolerance: float
) -> None:
    num_heads, num_kv_heads = HEADS[heads]
    rng = random.Random(num_kv_heads)
    torch.manual_seed(0)
    for _ in range(25):
        block_size = rng.choice([1, 3, 16, 64])
        sizes = random_sizes(rng)
        shared = rng.choice([0, 0, 1, 4])
        batch, num_blocks = make_batch(sizes, block_size, rng, shared)
        keys, values = make_memory(batch, num_blocks, num_kv_heads, 8, dtype)
        q = torch.randn(sum(n for n, _ in sizes), num_heads, 8).to(dtype)
        # The judge computes in float64 whatever the two are given.
        want = attend(ReferenceBackend(), batch, q.double(), keys.double(), values.double())
        got = attend(SdpaBackend(), batch, q, keys, values)
        assert got.dtype == dtype and got.shape == q.shape
        assert float((got.double() - want).abs().max()) <= tolerance, (sizes, block_size)


def test_the_loop_agrees_with_the_formula() -> None:
    """One sequence, written out: query t of T sees keys 0 to N - T + t."""
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, h, 4, dtype=torch.float64) for n, h in ((3, 2), (5, 1), (5, 1)))
    batch, _ = make_batch([(3, 5)], 5, random.Random(0))
    slot = int(batch.block_tables[0, 0]) * 5
    keys, values = (torch.full((20, 1, 4), torch.nan, dtype=torch.float64) for _ in range(2))
    keys[slot : slot + 5], values[slot : slot + 5] = k, v
    out = attend(ReferenceBackend(), batch, q, keys, values)
    for t in range(3):
        for head in range(2):
            seen = 5 - 3 + t + 1
            weights = (k[:seen, 0] @ q[t, head] / 2.0).softmax(0)  # sqrt(D) = 2
            assert torch.allclose(out[t, head], weights @ v[:seen, 0], atol=1e-14)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_sequence_is_not_touched_by_the_others(backend: str) -> None:
    """A sequence of NaN, or of huge numbers, leaves its batch-mates exactly as they were."""
    torch.manual_seed(0)
    rng = random.Random(1)
    sizes = [(1, 40), (1, 40), (7, 40), (7, 33), (1, 200)]
    batch, num_blocks = make_batch(sizes, 4, rng)
    keys, values = make_memory(batch, num_blocks, 2, 8, torch.float64)
    q = torch.randn(17, 6, 8, dtype=torch.float64)
    before = attend(pick_backend(backend, CPU), batch, q, keys, values)
    starts = [*batch.query_starts, 17]
    for victim in range(len(sizes)):
        slots = batch.token_slots(np.array(victim), np.arange(sizes[victim][1]))
        for poison in (torch.nan, 1e300):
            bad_keys, bad_values = keys.clone(), values.clone()
            bad_keys[slots], bad_values[slots] = poison, poison
            after = attend(pick_backend(backend, CPU), batch, q, bad_keys, bad_values)
            for i in range(len(sizes)):
                rows = slice(starts[i], starts[i + 1])
                assert torch.equal(after[rows], before[rows]) == (i != victim)


class CountOps(TorchDispatchMode):
    """Counts every operation that torch carries out."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("size", [(1, 100), (20, 120)], ids=["decode", "chunks"])
def test_the_number_of_operations_does_not_grow_with_the_sequences(size: tuple[int, int]) -> None:
    counts: dict[str, dict[int, tuple[int, int]]] = {"sdpa": {}, "reference": {}}
    for name, of in counts.items():
        backend = pick_backend(name, CPU)
        for num_sequences in (2, 8, 32):
            # Lengths differ within a factor of two, so that padding is needed.
            sizes = [(size[0] - i % 3 * (size[0] > 1), size[1] - i) for i in range(num_sequences)]
            batch, num_blocks = make_batch(sizes, 16, random.Random(0))
            keys, values = make_memory(batch, num_blocks, 2, 8, torch.float32)
            q = torch.randn(int(batch.query_lens.sum()), 6, 8)
            with CountOps() as preparing:
                plan = backend.prepare(batch, q.dtype, CPU)
            with CountOps() as attending:
                backend.attend(q, keys, values, plan)
            of[num_sequences] = preparing.count, attending.count
    assert len(set(counts["sdpa"].values())) == 1, counts
    assert counts["reference"][32][1] > 10 * counts["reference"][2][1]


def test_padding_at_most_doubles_queries_and_contexts(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = random.Random(0)
    shapes: list[tuple[int, int]] = []
    fused = F.scaled_dot_product_attention

    def watched(q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        shapes.append((q.shape[0] * q.shape[1] * q.shape[2], k.shape[0] * k.shape[2]))
        return fused(q, k, v, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    for _ in range(20):
        shapes.clear()
        sizes = random_sizes(rng)
        batch, num_blocks = make_batch(sizes, 16, rng)
        keys, values = make_memory(batch, num_blocks, 2, 8, torch.float32)
        num_tokens = sum(n for n, _ in sizes)
        attend(SdpaBackend(), batch, torch.randn(num_tokens, 6, 8), keys, values)
        assert sum(queries for queries, _ in shapes) <= 2 * num_tokens * 6
        contexts = sum(max(context, SMALLEST_CONTEXT) for _, context in sizes)
        assert sum(keys for _, keys in shapes) <= 2 * contexts


def test_backends_go_by_name() -> None:
    assert isinstance(pick_backend("reference", CPU), ReferenceBackend)
    assert isinstance(pick_backend("sdpa", CPU), SdpaBackend)
    assert isinstance(pick_backend("auto", CPU), SdpaBackend)
    with pytest.raises(ValueError, match=r"attention_backend .*auto, reference, sdpa.*'flash'"):
        pick_backend("flash", CPU)
