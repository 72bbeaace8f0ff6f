"""From a plan to tensors: the chunks of a step laid end to end, without padding.

    chunks      A: token 40         B: tokens 0-3 (prompt)      C: token 17
    input_ids   [ a40 |               b0  b1  b2  b3 |            c17 ]        T = 6
    positions   [  40 |                0   1   2   3 |             17 ]
    slots       where in KV memory each token's key and value go
    logit_rows  [   0                              4               5 ]        who gets a token

T tokens, S sequences (one a chunk), R rows that need a token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from infer_lab.allocator import KVAllocator
from infer_lab.request import Request
from infer_lab.sampler import SamplingRow
from infer_lab.scheduler import StepPlan

IntArray = NDArray[np.int64]


@dataclass(frozen=True)
class Batch:
    """One step's input. Tensors lie on the device, arrays on the host."""

    input_ids: Tensor  # (T,)
    positions: Tensor  # (T,) each token's place in its own sequence
    slots: Tensor  # (T,) where its key and value are written
    logit_rows: Tensor  # (R,) rows of hidden whose logits are needed
    query_lens: IntArray  # (S,) tokens of each sequence in this step
    context_lens: IntArray  # (S,) tokens to see, this step's included
    block_tables: IntArray  # (S, most blocks); 0 behind a table's end
    block_size: int
    sampling: tuple[SamplingRow, ...]  # R of them

    @property
    def query_starts(self) -> IntArray:
        """(S,) where each sequence begins in the flat run."""
        return np.cumsum(self.query_lens) - self.query_lens

    def token_slots(self, sequences: IntArray, positions: IntArray) -> IntArray:
        """The slot of each position of each sequence; both arrays broadcast."""
        block = self.block_tables[sequences, positions // self.block_size]
        return block * self.block_size + positions % self.block_size


def pack(plan: StepPlan, allocator: KVAllocator, device: torch.device) -> Batch:
    """Turn a plan with at least one chunk into a batch on a device."""
    chunks = plan.chunks
    query_lens = np.array([chunk.length for chunk in chunks])
    context_lens = np.array([chunk.end for chunk in chunks])
    block_size = allocator.block_size
    tables = np.zeros((len(chunks), int(-(-context_lens.max() // block_size))), dtype=np.int64)
    for row, chunk in zip(tables, chunks, strict=True):
        used = -(-chunk.end // block_size)
        row[:used] = allocator.table(chunk.request)[:used]
    ids = [token for c in chunks for token in c.request.token_ids[c.start : c.end]]
    ends = np.cumsum(query_lens)
    sequence = np.repeat(np.arange(len(chunks)), query_lens)  # (T,) whose token it is
    positions = np.arange(len(ids)) + np.repeat(context_lens - ends, query_lens)
    samples = np.array([chunk.samples for chunk in chunks])
    slots = tables[sequence, positions // block_size] * block_size + positions % block_size
    staged = to_device(np.concatenate((ids, positions, slots, ends[samples] - 1)), device)
    ids_, positions_, slots_, logit_rows = staged.split([len(ids)] * 3 + [int(samples.sum())])
    return Batch(
        input_ids=ids_,
        positions=positions_,
        slots=slots_,
        logit_rows=logit_rows,
        query_lens=query_lens,
        context_lens=context_lens,
        block_tables=tables,
        block_size=block_size,
        sampling=tuple(_sampling_row(chunk.request) for chunk in chunks if chunk.samples),
    )


def to_device(array: NDArray[np.generic], device: torch.device) -> Tensor:
    """An array as a tensor on a device; to CUDA through pinned memory, without waiting."""
    tensor = torch.from_numpy(np.ascontiguousarray(array))
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def _sampling_row(request: Request) -> SamplingRow:
    needs_tokens = request.params.adjusts_logits
    return SamplingRow(
        params=request.params,
        seed=request.seed,
        sample_index=request.index,
        output_index=request.num_output,
        prompt_token_ids=request.prompt_token_ids if needs_tokens else (),
        output_token_ids=request.output_token_ids if needs_tokens else (),
        end_token_ids=tuple(request.end_token_ids) if needs_tokens else (),
    )
