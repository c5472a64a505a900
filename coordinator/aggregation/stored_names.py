"""The tensors of a base model by the names that its parameters have in the model, in which adapters are named.

transformers 5 stores some models under other names than their parameters have (a ViT's `vit.layers.0.attention.q_proj`
as `vit.encoder.layer.0.attention.attention.query`), and an adapter is named after the parameter.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from facility.exchange.checkpoints.checkpoint import Checkpoint, TensorEntry
from facility.exchange.checkpoints.conversion import check_names
from facility.exchange.errors import CheckpointError


def stored_tensor(base: Checkpoint, parameter: str) -> TensorEntry | None:
    """The tensor that holds the parameter of that name, as it is; None where the base has none.

    transformers is asked, which takes seconds, only where no tensor has the name itself.
    """
    found = base.tensors.get(parameter)
    return base.tensors.get(_renamed(base.directory).get(parameter, "")) if found is None else found


@lru_cache(maxsize=4)
def _renamed(directory: Path) -> Mapping[str, str]:
    """Name of a parameter -> of the tensor that holds it; {} where config.json describes no model that can be built."""
    try:
        return check_names(directory).same
    except (CheckpointError, ImportError, OSError, ValueError):
        return {}
