"""Where the units of a Hugging Face model are, found by what runs when in one forward pass without values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from facility.exchange.errors import InputError, named_line


@dataclass(frozen=True, kw_only=True)
class ModelStructure:
    """Where the units of a model are."""

    blocks: str
    """Name of the list of blocks."""
    count: int
    """Blocks in it: L."""
    before: tuple[str, ...]
    """Modules with parameters of their own that run before the first block."""
    after: tuple[str, ...]
    """Modules with parameters of their own that run after the last block, or never."""
    tuple_length: int
    """Items of the tuple that a block returns, the activation first; 0: it returns the activation alone."""
    hidden: int
    """Width of the activation between blocks."""
    logits: tuple[int, ...]
    """Shape of the logits after the batch dimension, for one block of tokens."""
    tokens: int
    """Positions of the activation between blocks."""
    image: tuple[int, int, int] | None = None
    """Channels, height and width of what an image model takes; None: token ids."""
    entry: str = ""
    """Image models, which take no embeddings: the module whose output the first block is called with."""

    @property
    def main_input(self) -> str:
        """What the first stage's input is called."""
        return "pixel_values" if self.image else "input_ids"

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sequence or image, as the first stage takes it."""
        return self.image or (self.tokens,)

    @property
    def input_dtype(self) -> torch.dtype:
        return torch.float32 if self.image else torch.int64

    @property
    def units(self) -> int:
        return self.count + 2

    def unit_of(self, parameter: str) -> int:
        """Unit that owns the parameter of that name."""
        if parameter.startswith(self.blocks + "."):
            return int(parameter[len(self.blocks) + 1 :].split(".", 1)[0]) + 1
        return 0 if parameter.rpartition(".")[0] in self.before else self.count + 1


@dataclass(kw_only=True)
class ForwardPass:
    """What ran when in one forward pass."""

    own: list[str]
    """Modules outside the blocks that have parameters of their own."""
    entry: str = ""
    """The outermost module that returned what the first block was called with; empty: none did."""
    before: list[str] = field(default_factory=list)
    """Those of them that ran before the first block."""
    after: list[str] = field(default_factory=list)
    hidden: Any = None
    """What the first block was called with first."""
    output: Any = None
    """What the first block returned."""
    calls: int = 0
    """How often the first block ran."""
    beside: bool = False
    """Whether it was called with a second tensor of the activation's shape."""


def watch_forward(model: nn.Module, blocks: str, first: nn.Module) -> ForwardPass:
    """Hooks that note what runs when; `first`: the first of the modules named `blocks`."""
    own = [n for n, m in model.named_modules() if m._parameters and not n.startswith(blocks + ".")]
    around = {blocks.rsplit(".", depth)[0] for depth in range(blocks.count(".") + 1)}
    outside = [n for n, _ in model.named_modules() if n and n not in around and not n.startswith(blocks + ".")]
    ran, begun = ForwardPass(own=own), False
    returned: list[tuple[str, Any]] = []

    def first_block(module: nn.Module, args: tuple, kwargs: dict) -> None:
        nonlocal begun
        ran.hidden, begun = args[0] if args else kwargs.get("hidden_states"), True
        given = [*args, *kwargs.values()]
        like = [one for one in given if isinstance(one, torch.Tensor) and one.is_floating_point()]
        ran.beside = isinstance(ran.hidden, torch.Tensor) and sum(one.shape == ran.hidden.shape for one in like) > 1
        ran.entry = min((name for name, output in returned if output is ran.hidden), key=len, default="")
        returned.clear()

    def block_output(module: nn.Module, args: tuple, output: Any) -> None:
        ran.output = output
        ran.calls += 1

    first.register_forward_pre_hook(first_block, with_kwargs=True)
    first.register_forward_hook(block_output)
    for name in outside:

        def keep(module: nn.Module, args: tuple, output: Any, name: str = name) -> None:
            if not begun:
                returned.append((name, output))

        model.get_submodule(name).register_forward_hook(keep)
    for name in own:

        def note(module: nn.Module, args: tuple, output: Any, name: str = name) -> None:
            (ran.after if begun else ran.before).append(name)

        model.get_submodule(name).register_forward_hook(note)
    return ran


def check_sharing(model: nn.Module, blocks: str) -> None:
    """Raise `InputError` where a block has a weight of another block, or of what is around them.

    Stages would each train a copy of their own. Embedding and head may share one: that is seen to.
    """
    found: dict[int, tuple[str, str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        inside = name.startswith(blocks + ".")
        place = name[len(blocks) + 1 :].split(".", 1)[0] if inside else ""
        other, where = found.setdefault(id(parameter), (name, place))
        if place != where:
            raise InputError(
                f"{type(model).__name__} cannot be split into stages: {other} and {name} are one weight; train it with "
                "layout.stages 1"
            )


def forward_without_values(model: Any, tokens: int, image: tuple[int, int, int] | None) -> torch.Tensor:
    """Logits of one block of tokens, or of one image. Raises `InputError`."""
    try:
        if image:
            return model(pixel_values=torch.zeros(1, *image, dtype=torch.bfloat16)).logits
        return model(input_ids=torch.zeros(1, tokens, dtype=torch.int64)).logits
    except Exception as error:  # whatever a family's own code raises where values are asked of a tensor without any
        raise InputError(
            f"{type(model).__name__} cannot be split into stages: its forward pass cannot be followed without values "
            f"({named_line(error)}); train it with layout.stages 1"
        ) from None


def check_activation(ran: ForwardPass, expected: str) -> None:
    """Raise `InputError` (it begins with `expected`) unless the first block keeps the shape of its activation."""
    if not isinstance(ran.hidden, torch.Tensor):
        raise InputError(f"{expected} being called with the activation first, found {type(ran.hidden).__name__}")
    first = ran.output[0] if isinstance(ran.output, tuple) else ran.output
    if ran.hidden.dim() != 3:
        raise InputError(f"{expected} being called with an activation of three dimensions, found {ran.hidden.dim()}")
    if not isinstance(first, torch.Tensor) or first.shape != ran.hidden.shape:
        raise InputError(
            f"{expected} returning an activation of shape {tuple(ran.hidden.shape)}, found {type(ran.output).__name__}"
        )
