"""Documents that share a block are trained as if each were alone: what a model must do for that, and whether it does.

transformers keeps documents apart where a model builds its attention mask from positions that restart at 0. Which
families do is not declared anywhere, and one that does not trains without an error. So the model at hand is tested: the
loss of a document must not change with the document before it, and must be that of the document alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from facility.exchange.checkpoints.separate_documents import advice, refusal_of_positions
from facility.exchange.errors import InputError
from facility.training.data.tasks import IGNORED, Batch, positions_within

LENGTH = 24
"""Tokens of each of the two documents of the trial, at most."""
LEAK = {"float32": 1e-5, "bfloat16": 2e-3, "float16": 1e-3}
"""Share of a document's loss that rounding may change where only the document before it is another."""
ALONE = {"float32": 1e-4, "bfloat16": 1e-2, "float16": 5e-3}
"""Share of a document's loss that rounding may change where the whole block is another."""


def check_positions(config: Any, factory: Any, task: str, block_tokens: int = 0) -> None:
    """Refuse what `refusal_of_positions` says of this model. Raises `InputError`."""
    if reason := refusal_of_positions(factory._model_mapping[type(config)], config, task, block_tokens):
        raise InputError(reason)


@torch.no_grad()
def check_separation(loss_of: Callable[[Batch], float], inputs: Any, dtype: str) -> None:
    """Compare a document's loss after one document, after another, and alone; the same trial on every rank.

    `dtype`: what the model computes in. Raises `InputError` where they differ by more than rounding.
    """
    otherwise = advice(inputs.dataset.manifest.task)
    length = min(LENGTH, inputs.block_tokens // 2)
    if length < 2:
        return
    draw = torch.Generator().manual_seed(0)
    one, other, last = torch.randint(inputs.dataset.manifest.vocabulary_size, (3, length), generator=draw)
    after = [loss_of(trial(first, last)) for first in (one, other)]
    alone = loss_of(trial(last))
    scale = max(1.0, abs(alone))
    kind = type(inputs.config).__name__.removesuffix("Config")
    if abs(after[0] - after[1]) > LEAK[dtype] * scale:
        raise InputError(
            f"a {kind} lets a document see the one before it in its block (loss {after[0]:.6f} after one, "
            f"{after[1]:.6f} after another): {otherwise}"
        )
    if abs(after[0] - alone) > ALONE[dtype] * scale:
        raise InputError(
            f"a {kind} does not begin the positions of a document anew in its block (loss {after[0]:.6f}, alone "
            f"{alone:.6f}): {otherwise}"
        )


def trial(*documents: torch.Tensor) -> Batch:
    """One block of these documents; the last one bears loss."""
    ids = torch.cat(documents)[None]
    starts = torch.zeros(ids.shape, dtype=torch.bool)
    starts[0, 0] = True
    first = ids.shape[1] - len(documents[-1])
    starts[0, first] = True
    targets = torch.full_like(ids, IGNORED)
    targets[0, first:-1] = ids[0, first + 1 :]
    return Batch(inputs={"input_ids": ids, "position_ids": positions_within(starts)}, targets=targets)
