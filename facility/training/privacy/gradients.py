"""The gradient of every record by itself, clipped, and their sum (Abadi et al. 2016, arXiv 1607.00133, algorithm 1).

Gradients of a micro-batch's rows come from one vectorised backward pass (`torch.func`), or, for a model that cannot be
vectorised, from a pass for each row; both are exact. A record whose gradient is not finite contributes nothing, so that
no single record decides whether a step is taken.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.func import functional_call, vjp, vmap

from facility.exchange.errors import InputError, first_line
from facility.training.data.tasks import IGNORED, Task
from facility.training.parallel.compute import Precision
from facility.training.privacy.rows import Rows
from facility.training.trained_rank import TrainedRank

log = logging.getLogger(__name__)
Tensors = dict[str, torch.Tensor]
Gradients = list[torch.Tensor]
"""One for each trained parameter, in order."""
SQUARED_AT_ONCE = 1 << 18
"""Values of gradients that are in float64 at once while norms are worked out."""


class RecordGradients:
    """Clipped sums of the gradients of single records, for one whole model on this rank."""

    def __init__(
        self,
        model: nn.Module,
        trained: Sequence[nn.Parameter],
        task: Task,
        precision: Precision,
        *,
        vectorise: bool,
        held: TrainedRank | None = None,
    ) -> None:
        """`held`: what is not trained of the parameters `trained`; None: nothing."""
        check_model(model)
        self.model, self.task, self.precision, self.held = model, task, precision, held
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        self.parameters = {names[id(parameter)]: parameter for parameter in trained}
        self.vectorise = vectorise
        """False once the model was found not to be vectorisable."""

    def clipped_sum(self, batches: Iterable[Rows], limit: float) -> Gradients:
        """Sum over all records of the gradient of their mean loss, each scaled down to the L2 norm `limit`."""
        total = [torch.zeros_like(one, dtype=torch.float32) for one in self.parameters.values()]
        self.model.train()
        for rows in batches:
            for of_records in self._of_records(rows):
                trained = of_records if self.held is None else self.held.without_held(of_records)
                add_clipped(total, trained, limit)
                del of_records, trained  # they would be there beside those of the next pass
        return total

    def _of_records(self, rows: Rows) -> Iterable[Gradients]:
        """Gradients with a leading dimension of records; several times where records are looked at one by one."""
        if self.vectorise:
            try:
                of_rows = self._vectorised(rows)
            except torch.OutOfMemoryError:
                raise
            except (RuntimeError, NotImplementedError) as error:
                self.vectorise = False
                log.info("gradients of records are computed one by one: %s", first_line(error)[:200])
            else:
                return [by_record(of_rows, rows)]
        return self._one_by_one(rows)

    def _vectorised(self, rows: Rows) -> Gradients:
        inputs, targets, share = self._on_device(rows)
        held = {name: parameter.detach() for name, parameter in self.parameters.items()}

        def gradient(row: Tensors, target: torch.Tensor, part: torch.Tensor) -> Tensors:
            """`torch.func.grad` would keep all of the pass, and of its backward pass, for a second derivative."""
            batch = {name: value[None] for name, value in row.items()}
            backward = vjp(lambda weights: self._loss(weights, batch, target[None]), held)[1]
            found: Tensors = backward(part, retain_graph=False, create_graph=False)[0]
            return found

        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*not yet implemented the batching rule.*")
            found = vmap(gradient, randomness="different")(inputs, targets, share)
        return [found[name].float() for name in self.parameters]

    def _one_by_one(self, rows: Rows) -> Iterable[Gradients]:
        inputs, targets, share = self._on_device(rows)
        parameters = list(self.parameters.values())
        for record in range(rows.records):
            total: Gradients = []
            for row in torch.nonzero(rows.record == record).flatten().tolist():
                piece = slice(row, row + 1)
                loss = self._loss(None, {name: value[piece] for name, value in inputs.items()}, targets[piece])
                found = torch.autograd.grad(loss * share[row], parameters, allow_unused=True, materialize_grads=True)
                own = [one.float()[None] for one in found]
                total = [a + b for a, b in zip(total, own, strict=True)] if total else own
                del found, own, loss
            yield total

    def _loss(self, weights: Tensors | None, inputs: Tensors, targets: torch.Tensor) -> torch.Tensor:
        with self.precision():
            out = self.model(**inputs) if weights is None else functional_call(self.model, weights, (), inputs)
        return self.task.loss_sum(out.logits, targets)

    def _on_device(self, rows: Rows) -> tuple[Tensors, torch.Tensor, torch.Tensor]:
        device = self.precision.device
        inputs = {name: value.to(device) for name, value in rows.inputs.items()}
        return inputs, rows.targets.to(device), rows.share().to(device)

    @torch.no_grad()
    def losses(self, rows: Rows) -> torch.Tensor:
        """Mean loss of each record's predictions, on the CPU in float64; 0 for a record without any."""
        inputs, targets, share = self._on_device(rows)
        self.model.eval()
        with self.precision():
            logits = self.model(**inputs).logits
        each = nn.functional.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(), targets.reshape(-1), ignore_index=IGNORED, reduction="none"
        )
        of_rows = (each.view(len(share), -1).sum(1) * share).double().cpu()
        return torch.zeros(rows.records, dtype=torch.float64).index_add_(0, rows.record, of_rows)


def check_model(model: nn.Module) -> None:
    """Refuse a model whose records see each other. Raises `InputError`."""
    for name, module in model.named_modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            raise InputError(
                f"{name} is a batch normalisation, by which the records of a batch change each other's gradients: "
                "differential privacy needs a model without it"
            )


def by_record(of_rows: Gradients, rows: Rows) -> Gradients:
    """Sum the rows of each record, in place of what the list held."""
    if rows.records < len(rows.record):
        place = rows.record.to(of_rows[0].device)
        for number, one in enumerate(of_rows):
            of_rows[number] = one.new_zeros((rows.records, *one.shape[1:])).index_add_(0, place, one)
    return of_rows


def add_clipped(total: Gradients, of_records: Gradients, limit: float) -> None:
    """Add every record's gradient, scaled down to the norm `limit`, to the total."""
    norms = torch.stack([squares(one.flatten(1)) for one in of_records]).sum(0).sqrt()
    finite = torch.isfinite(norms)
    factor = (limit / norms.clamp(min=limit)).where(finite, 0.0).float()
    for whole, one in zip(total, of_records, strict=True):
        if not bool(finite.all()):
            one = one.where(finite.view(-1, *[1] * (one.dim() - 1)), 0.0)
        whole.add_(torch.tensordot(factor, one, dims=1))


def squares(rows: torch.Tensor) -> torch.Tensor:
    """Sum of squares of each row, in float64."""
    pieces = rows.split(max(1, SQUARED_AT_ONCE // len(rows)), dim=1)
    return torch.stack([piece.double().square().sum(1) for piece in pieces]).sum(0)
