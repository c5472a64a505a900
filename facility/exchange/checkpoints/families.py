"""What follows from a model's configuration alone: whether its family is refused, and how long its sequences may be.

The coordinator asks before a federation starts, the trainer before it loads anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from facility.exchange.checkpoints.model_files import CONFIG
from facility.exchange.checkpoints.task_class import CAUSAL, FACTORIES
from facility.exchange.errors import CheckpointError
from facility.exchange.task_words import Task

RUNNING_RANGES = ("ibert",)
"""Families that keep running ranges of their activations in buffers, in training as in evaluation."""


FROM_PADDING = (
    "camembert",
    "data2vec-text",
    "esm",
    "longformer",
    "luke",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Families whose first token has the position after `pad_token_id`: so many fewer tokens fit their positions."""


def text_part(config: Mapping[str, Any]) -> Any:
    """What a `config.json` says of the part that reads text: a model of several parts states it in `text_config`."""
    return config.get("text_config") or config


def checked_text_part(config: Mapping[str, Any], directory: Path) -> dict[str, Any]:
    """`text_part` of the `config.json` of `directory`. Raises `CheckpointError` where it is not an object."""
    part = text_part(config)
    if not isinstance(part, dict):
        raise CheckpointError(f"{directory / CONFIG}: its text_config is a {type(part).__name__}, expected an object")
    return part


def most_positions(config: Mapping[str, Any]) -> int:
    """Tokens of the longest sequence that a model of this `config.json` takes; 0: it does not say."""
    found = config.get("max_position_embeddings") or config.get("n_positions")
    most = found if isinstance(found, int) and found > 0 else 0
    absolute = (config.get("position_embedding_type") or "absolute") == "absolute"
    if most and absolute and config.get("model_type") in FROM_PADDING:
        padding = config.get("pad_token_id", 1)
        most = max(1, most - 1 - padding) if isinstance(padding, int) else most
    return most


def why_untrainable(config: Any, *, causal: bool) -> str:
    """Why a model of this configuration (transformers') cannot be trained; empty: nothing is known against it.

    `causal`: it is to predict next tokens.
    """
    family = getattr(config, "model_type", "")
    if family in RUNNING_RANGES:
        return (
            f"a {family} model moves the ranges of its activations (buffers such as x_min) in every forward pass of "
            "training, and updates carry only what is trained: its ranges would stay as received; take another family"
        )
    if causal and family == "xlnet":
        return "XLNet predicts tokens in permuted orders, which no dataset here has: train a causal model"
    if causal and family == "cpmant":
        return "transformers' CPM-Ant attends to the whole text, also to the tokens that it is to predict: take another"
    if causal and family in ("xlm", "flaubert") and not getattr(config, "causal", False):
        return (
            f"the model's config.json has causal false: a {family} then sees the tokens that it is to predict; set "
            "causal to true in the initial model, or prepare the dataset with --task masked-lm"
        )
    return sees_ahead(config) if causal else ""


def sees_ahead(config: Any) -> str:
    """Why an encoder that sees the token it is to predict is refused: its loss would fall to nothing."""
    from transformers import AutoModelForMaskedLM

    encoder = not config.is_encoder_decoder and type(config) in AutoModelForMaskedLM._model_mapping
    if encoder and getattr(config, "is_decoder", True) is False:
        return (
            f"the model's config.json has is_decoder false: a {config.model_type} then sees the tokens that it is to "
            "predict; set is_decoder to true in the initial model, or prepare the dataset with --task masked-lm"
        )
    return ""


def refusal_for(config: Any, task: Task | None) -> str:
    """Why a model of this config.json cannot be trained; empty: nothing is known against it.

    What it is to predict follows from the task, or from the class that config.json names.
    """
    if task is not None:
        return why_untrainable(config, causal=FACTORIES[task] == CAUSAL)
    classes = config.architectures or ["ForCausalLM"]
    return why_untrainable(config, causal=any(one.endswith(("ForCausalLM", "LMHeadModel")) for one in classes))
