"""What of an optimizer's state may leave its facility with an update, where moments are shared."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import TensorEntry, open_checkpoint
from facility.exchange.checkpoints.patterns import Patterns


def leaving(
    state: Path, sent: Mapping[str, tuple[int, ...]], federated: Patterns
) -> Iterator[tuple[str, str, TensorEntry]]:
    """(kind of moment, parameter, tensor in the state directory), in the order of their names.

    Only parameters that are federated leave, as with the weights, and only those that the update holds by the same name
    and shape (`sent`): experts that are fused here and apart on disk keep moments of their own.
    """
    for key, entry in sorted(open_checkpoint(state).tensors.items()):
        kind, _, name = key.partition(".")
        if federated.federated(name) and sent.get(name) == entry.shape:
            yield kind, name, entry
