"""Why a model cannot keep documents apart that share a block: what its class and its configuration say.

The coordinator asks before a federation starts, the trainer before it loads anything. What they do not say is tried
with the model at hand (`facility.training.data.documents`).
"""

from __future__ import annotations

import inspect
from typing import Any

WAYS = {
    "chat": "prepare the dataset with --documents padded (one document a block) or joined",
    "causal-lm": "prepare the dataset with --documents joined",
}
"""By task, how a dataset is prepared for a family of models that cannot keep documents apart."""


def advice(task: str) -> str:
    """What to do where the model cannot keep the documents of a dataset of this task apart."""
    return WAYS.get(task, f"{task} needs documents that are kept apart: train a model of another family")


def refusal_of_positions(kind: Any, config: Any, task: str, block_tokens: int = 0) -> str:
    """Why a model of the class `kind` would read the documents of a block as one text, or in another way for a long one
    among them; empty: nothing is known against it.

    `task`: of the dataset. `block_tokens`: of its blocks; 0: documents do not share a pass, or it is not known.
    """
    if "position_ids" not in inspect.signature(kind.forward).parameters:
        return (
            f"{kind.__name__} takes no positions, so documents that share a block would be read as one text: "
            f"{advice(task)}"
        )
    return refusal_of_lengths(config, block_tokens, task)


def refusal_of_lengths(config: Any, block_tokens: int, task: str) -> str:
    """Why documents may not share blocks so long: one of them can change how all others of its pass are read.

    transformers turns a model with `longrope` by its longer factors as soon as one position of a pass is beyond the
    original length. Blocks of one text always are.
    """
    reading = config.get_text_config()
    stated = getattr(reading, "rope_parameters", None) or {}
    kinds = [stated] if "rope_type" in stated else [one for one in stated.values() if isinstance(one, dict)]
    for one in kinds:
        original = one.get("original_max_position_embeddings") or block_tokens
        if one.get("rope_type") == "longrope" and block_tokens > original:
            other = f", or {advice(task).removeprefix('prepare the dataset ')}" if task in WAYS else ""
            return (
                f"documents share blocks of {block_tokens} tokens, and once one is longer than {original} tokens a "
                f"{reading.model_type} reads all others of its pass with other positions (longrope): prepare the "
                f"dataset with --block-tokens {original} or fewer{other}"
            )
    return ""
