"""What of an optimizer's state may leave its facility with an update, where moments are shared."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import TensorEntry, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns


def leaving(state: Path, update: Path, federated: Patterns) -> Iterator[tuple[str, str, TensorEntry]]:
    """(kind of moment, parameter, tensor in the state directory), in the order of their names.

    Only parameters that are federated leave, as with the weights, and only those that the update holds by the same name
    and shape: experts that are fused here and apart on disk keep moments of their own.
    """
    sent = open_checkpoint(update).tensors
    for key, entry in sorted(open_checkpoint(state).tensors.items()):
        kind, _, name = key.partition(".")
        if federated.federated(name) and name in sent and sent[name].shape == entry.shape:
            yield kind, name, entry
