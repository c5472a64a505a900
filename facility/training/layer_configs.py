"""What a configuration says of each layer: one value for all, or one a layer, as Gemma 4's dimensions of a head."""

from __future__ import annotations

from typing import Any


def layer_configs(config: Any) -> list[Any]:
    """A configuration for each layer of a model. Where layers differ, transformers refuses to read that of all."""
    if getattr(config, "is_heterogeneous", False):
        return list(config.per_layer_config)
    kinds = getattr(config, "layer_types", None)
    return [config] * (len(kinds) if kinds else getattr(config, "num_hidden_layers", None) or 0)


def largest(config: Any, name: str, default: Any = None) -> Any:
    """The value `name` of a configuration; where layers differ, the largest of theirs."""
    if not getattr(config, "is_heterogeneous", False):
        return getattr(config, name, default)
    stated = (getattr(one, name, None) for one in config.per_layer_config)
    return max((value for value in stated if value is not None), default=default)
