"""The weights of a checkpoint as a trainer would hold them under a facility's settings."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from coordinator.memory.figures import IN_A_BLOCK, ModelFigures, is_matrix_of_a_block
from facility.exchange.checkpoints.adapter_targets import STATE_SPACE
from facility.exchange.checkpoints.adapters import HEADS, A, B, is_adapter, is_factor, is_saved_module, is_targeted
from facility.exchange.checkpoints.patterns import matches_any
from facility.exchange.memory.units import EMBEDDING, Dimensions, Weight
from facility.exchange.messages.settings import TrainingSettings

STORED = {"BF16": "bfloat16", "F16": "float16"}
"""Half precision, by safetensors' name of it."""
HEAD = re.compile(r"(^|\.)(lm_head|embed_out|score|classifier)\.weight$")
"""Linear layers behind the last block."""


def dimensions_of(model: ModelFigures) -> Dimensions:
    """Dimensions of a model as the memory prediction takes them, from its checkpoint."""
    gated = any(".gate_proj." in name for name in model.shapes)
    return Dimensions(
        hidden=model.hidden,
        blocks=model.layers,
        vocabulary=model.vocabulary,
        gated=model.inner / model.hidden if gated and model.inner and model.hidden else 0.0,
    )


def weights_of(model: ModelFigures, training: TrainingSettings, *, chunked: bool) -> list[Weight]:
    """Every weight that a trainer would hold, adapters included. `chunked`: the loss is computed in chunks.

    Where the shapes are not known all weights lie in the blocks, evenly, and all are trained.
    """
    if not model.shapes:
        blocks = max(1, model.layers)
        return [
            Weight(
                name="",
                shape=((model.parameters + block) // blocks,),
                unit=block + 1,
                trained=True,
                copied=training.compute_dtype != "float32",
            )
            for block in range(blocks)
        ]
    return [one for name, shape in model.shapes.items() for one in _weights(model, training, name, shape, chunked)]


def _weights(
    model: ModelFigures, training: TrainingSettings, name: str, shape: Sequence[int], chunked: bool
) -> Iterator[Weight]:
    """A tensor of the checkpoint, and the adapter beside it."""
    lora, unit, module = training.lora, unit_of(model, name), name.rpartition(".")[0]
    half, again = training.compute_dtype != "float32", training.layout.activation_checkpointing != "none"
    matrix = is_matrix_of_a_block(name, shape)
    saved = bool(lora.rank) and is_saved_module(module, lora.modules_to_save or HEADS)
    trained = (not lora.rank or saved or is_adapter(name)) and not matches_any(name, training.freeze)
    held = _held_bytes(model, training, name) if matrix and lora.rank and not trained else 4.0
    linear = matrix or is_factor(name) or (HEAD.search(name) is not None and not chunked)
    yield Weight(
        name=name,
        shape=tuple(shape),
        unit=unit,
        trained=trained,
        held_bytes=held,
        copied=half and linear and held == 4 and (trained or not again),
    )
    if not lora.rank or saved or any(is_adapter(other) for other in model.shapes):
        return
    if matrix and (not lora.targets or is_targeted(module, lora.targets)):
        yield from _adapter(module, unit, shape[0], shape[1], lora.rank, half)
        if lora.dora:
            yield Weight(name=f"{module}.lora_magnitude_vector", shape=(shape[0],), unit=unit, trained=True)
    elif len(shape) == 3 and is_targeted(name, lora.parameters):
        yield from _adapter(module, unit, shape[1], shape[2], lora.rank * shape[0], half)


def _adapter(module: str, unit: int, outputs: int, inputs: int, rank: int, half: bool) -> Iterator[Weight]:
    for factor, shape in ((A, (rank, inputs)), (B, (outputs, rank))):
        yield Weight(name=f"{module}{factor}weight", shape=shape, unit=unit, trained=True, copied=half)


def _held_bytes(model: ModelFigures, training: TrainingSettings, name: str) -> float:
    """Bytes a value of a frozen linear layer: quantised, half precision as stored, or float32."""
    lora = training.lora
    if lora.quantize_base != "none":
        return lora.base_bytes
    same = STORED.get(model.dtypes.get(name, "")) == training.compute_dtype
    return 2.0 if same and not lora.dora and model.family not in STATE_SPACE else 4.0


def unit_of(model: ModelFigures, name: str) -> int:
    """The unit that holds a tensor: 0 the embedding, then the blocks, then the head."""
    if found := IN_A_BLOCK.search(name):
        return int(found.group()[1:-1]) + 1
    return 0 if EMBEDDING.search(name) else model.layers + 1
