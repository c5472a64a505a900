"""Units as rows of a forward pass: one row for each piece, and which record (unit) it belongs to."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn

from facility.dataset import PreparedDataset
from facility.exchange.seeds import derive_seed
from facility.training.data.tasks import IGNORED, Task
from facility.training.privacy.units import Units, bears_loss


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Whole records; a record's rows follow each other."""

    inputs: dict[str, torch.Tensor]
    """Keyword arguments of the model's forward, a row each."""
    targets: torch.Tensor
    record: torch.Tensor
    """Number of each row's record, from 0."""
    records: int

    def share(self) -> torch.Tensor:
        """What each row's summed loss is multiplied by, so that a record's loss is the mean of its predictions."""
        asked = (self.targets.reshape(len(self.record), -1) != IGNORED).sum(1)
        whole = torch.zeros(self.records, dtype=asked.dtype).index_add_(0, self.record, asked)
        return 1.0 / whole.clamp(min=1)[self.record].float()


class RowReader:
    """Reads the units of one split."""

    def __init__(
        self, dataset: PreparedDataset, split: str, units: Units, task: Task, model: nn.Module, *, most_rows: int
    ) -> None:
        """`most_rows` of one forward pass of `model`; a unit of more pieces has one of its own."""
        self.dataset, self.split, self.units, self.task, self.most = dataset, split, units, task, most_rows
        self.cut = dataset.manifest.documents != "joined" and dataset.manifest.task != "classification"
        self.least_width = dataset.manifest.block_tokens if looks_at_lengths(model) else 0

    def read(self, chosen: Sequence[int] | np.ndarray, seed: int = 0) -> Iterator[Rows]:
        """The units `chosen`, in order. `seed`: for tasks that draw."""
        waiting: list[np.ndarray] = []
        for unit in chosen:
            pieces = self.units.of(int(unit))
            if waiting and sum(map(len, waiting)) + len(pieces) > self.most:
                yield self._rows(waiting, seed)
                waiting = []
            waiting.append(pieces)
        if waiting:
            yield self._rows(waiting, seed)

    def _rows(self, units: list[np.ndarray], seed: int) -> Rows:
        pieces = np.concatenate(units)
        record = torch.from_numpy(np.repeat(np.arange(len(units)), [len(one) for one in units]))
        if self.cut:
            inputs, targets = self._cut(pieces)
        else:
            blocks = pieces[:, 0]
            batch = self.task.batch(self.dataset, self.split, blocks, own_seeds(seed, self.dataset, self.split, blocks))
            inputs, targets = batch.inputs, batch.targets
        return Rows(inputs=inputs, targets=targets, record=record, records=len(units))

    def _cut(self, pieces: np.ndarray) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        """Each piece alone at the beginning of a row: what follows it is seen by none of its tokens, and how long that
        is by no model that would compute otherwise."""
        width = max(self.least_width, int((pieces[:, 2] - pieces[:, 1]).max()))
        ids, targets = torch.zeros(len(pieces), width, dtype=torch.int64), torch.full((len(pieces), width), IGNORED)
        tokens, marks = self.dataset.split(self.split).reshape(-1), self.dataset.marks(self.split).reshape(-1)
        block_tokens = self.dataset.manifest.block_tokens
        for row, (block, first, end) in enumerate(pieces.tolist()):
            piece = slice(block * block_tokens + first, block * block_tokens + end)
            own = torch.from_numpy(np.asarray(tokens[piece], dtype=np.int64))
            borne = torch.from_numpy(bears_loss(np.asarray(marks[piece])))
            ids[row, : end - first] = own
            targets[row, : end - first - 1] = torch.where(borne[1:], own[1:], IGNORED)
        return {"input_ids": ids}, targets


def own_seeds(seed: int, dataset: PreparedDataset, split: str, blocks: np.ndarray) -> list[int]:
    """For tasks that draw: a seed for each block by what the block holds. By its number, one unit less would have other
    tokens asked for in all units behind it, and change the sum by more than the clip."""
    rows = dataset.split(split)[blocks]
    return [derive_seed(seed, hashlib.sha256(np.ascontiguousarray(row).tobytes()).hexdigest()) for row in rows]


def looks_at_lengths(model: nn.Module) -> bool:
    """Whether a row's values depend on how long the rows of its forward pass are, filling included.

    So it is with rotary positions of the kinds `dynamic` and `longrope` (transformers' `dynamic_rope_update`): were the
    rows as long as the longest, one record would change the gradients of those beside it.
    """
    kinds: set[str] = set()
    for module in model.modules():
        found = getattr(module, "rope_type", None)
        kinds.update(map(str, found.values() if isinstance(found, dict) else [found]))
    return any("dynamic" in kind or kind == "longrope" for kind in kinds)
