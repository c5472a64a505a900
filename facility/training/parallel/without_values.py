"""A model without memory or arithmetic (FakeTensor), by which it is found out how it can be cut."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from facility.exchange.errors import InputError, named_line


def build_without_values(config: Any, factory: Any, attention: str, *, initialised: bool) -> Any:
    """The model of FakeTensors; not `initialised`: without drawing its weights, which looks at values in image models.

    Raises `InputError` for one that needs values, or has no base model.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException
    from transformers.initialization import no_init_weights

    try:
        with nullcontext() if initialised else no_init_weights():
            model = factory.from_config(config, dtype=torch.bfloat16, attn_implementation=attention).eval()
    except DataDependentOutputException as error:
        raise InputError(
            f"a {config.model_type} cannot be split into stages: it cannot be built without values "
            f"({named_line(error)}); train it with layout.stages 1"
        ) from None
    if getattr(model, getattr(model, "base_model_prefix", "") or "-", None) is None:
        raise InputError(
            f"{type(model).__name__} cannot be split into stages: looked for its base model under `base_model_prefix`"
        )
    return model
