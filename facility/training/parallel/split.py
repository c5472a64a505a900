"""Cut a Hugging Face model into stages of any units, found by structure and not by a list of names.

The whole module skeleton and its names stay (checkpoint keys never change); what a stage does not own is replaced by
parameter-free `PassThrough`, and the received activation enters where the stage's first block begins. Blocks are never
renumbered: `config.layer_types[i]` and the like keep meaning block i.

Units: 0 = everything that runs before the first block (embeddings), 1..L = blocks, L+1 = everything after the last.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import nn

from facility.exchange.checkpoints.blocks import find_blocks
from facility.exchange.checkpoints.layouts import refusal_of_stages
from facility.exchange.errors import InputError, named_line
from facility.training.head import ChunkedHead
from facility.training.parallel.structure import (
    ModelStructure,
    check_activation,
    check_sharing,
    forward_without_values,
    watch_forward,
)
from facility.training.parallel.without_values import build_without_values


def inspect_model(
    config: Any, factory: Any, attention: str, tokens: int, *, image: tuple[int, int, int] | None = None
) -> ModelStructure:
    """Run one forward pass without memory or arithmetic (FakeTensor) and note what runs when.

    `image`: channels, height and width of what an image model takes. Raises `InputError` for a model that cannot be
    split into stages.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    config = copy.deepcopy(config)
    config.use_cache = False
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        model = build_without_values(config, factory, attention, initialised=image is None)
        if reason := refusal_of_stages(model):
            raise InputError(reason)
        name, blocks = find_blocks(model)
        check_sharing(model, name)
        ran = watch_forward(model, name, blocks[0])
        logits = forward_without_values(model, tokens, image)
    if ran.calls > 1:
        raise InputError(
            f"{type(model).__name__} cannot be split into stages: it runs {name}[0] {ran.calls} times in one pass; "
            "train it with layout.stages 1"
        )
    if ran.beside:
        raise InputError(
            f"{type(model).__name__} cannot be split into stages: its blocks take embeddings beside the activation, "
            "and only the activation is sent; train it with layout.stages 1"
        )
    check_activation(ran, f"{type(model).__name__} cannot be split into stages: looked for {name}[0]")
    if image and not ran.entry:
        raise InputError(
            f"{type(model).__name__} cannot be split into stages: {name}[0] is not called with what one module returns"
        )
    output = ran.output
    early = tuple(n for n in ran.own if n in ran.before and n not in ran.after)
    structure = ModelStructure(
        blocks=name,
        count=len(blocks),
        before=early,
        after=tuple(n for n in ran.own if n not in early),
        tuple_length=len(output) if isinstance(output, tuple) else 0,
        hidden=ran.hidden.shape[-1],
        logits=tuple(logits.shape[1:]),
        tokens=ran.hidden.shape[1],
        image=image,
        entry=ran.entry if image else "",
    )
    try_stages(config, factory, attention, structure)
    return structure


def try_stages(config: Any, factory: Any, attention: str, structure: ModelStructure) -> None:
    """Run two stages cut in the middle, on the meta device.

    Raises `InputError` where a stage needs a module that it does not hold. Whatever cannot be decided without
    values is left to training.
    """
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    middle = structure.units // 2
    activation = (1, structure.tokens, structure.hidden)
    for first, end in ((0, middle), (middle, structure.units)):
        shape, dtype = (activation, torch.bfloat16) if first else ((1, *structure.input_shape), structure.input_dtype)
        value = torch.zeros(shape, dtype=torch.bfloat16 if structure.image else dtype)
        with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            model = build_without_values(config, factory, attention, initialised=structure.image is None)
            try:
                Stage(model, structure, first, end, torch.bfloat16)(value)
            except DataDependentOutputException:
                continue
            except Exception as error:  # whatever a family's own code raises without the modules that it looks for
                raise InputError(
                    f"{type(model).__name__} cannot be split into stages: one that holds units {first} to {end - 1} "
                    f"alone cannot run ({named_line(error)}); train it with layout.stages 1"
                ) from None


def as_block_returns(value: Any, tuple_length: int) -> Any:
    """The activation alone, or first in a tuple as long as the one that the model's blocks return."""
    return (value, *(None for _ in range(tuple_length - 1))) if tuple_length else value


class PassThrough(nn.Module):
    """Stands where another stage's module is: hands its first input on; for an embedding, adds nothing."""

    def __init__(self, *, embedding: bool = False, tuple_length: int = 0) -> None:
        super().__init__()
        self.embedding, self.tuple_length = embedding, tuple_length
        self.weight = torch.zeros(0)  # no parameter; image models ask the first layer for the dtype of its weight

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.embedding:
            return torch.zeros(())
        value = args[0] if args else next(iter(kwargs.values()))
        return as_block_returns(value, self.tuple_length)


class ActivationOutput(PassThrough):
    """Stands for the block after a stage's last: keeps what that one returns, before anything that follows the blocks.

    A final norm without parameters, or a scale, belongs to the last stage alone.
    """

    def __init__(self, *, tuple_length: int) -> None:
        super().__init__(tuple_length=tuple_length)
        self.left: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        value = super().forward(*args, **kwargs)
        self.left = value[0] if self.tuple_length else value
        return value

    def after(self, block: nn.Module) -> None:
        """Keep what `block` returns, where no block follows that this could stand for."""

        def keep(module: nn.Module, args: tuple, output: Any) -> None:
            self(output[0] if isinstance(output, tuple) else output)

        block.register_forward_hook(keep)

    def take(self) -> torch.Tensor:
        """What was kept, which is kept no longer."""
        assert self.left is not None, "the model has run its blocks"
        value, self.left = self.left, None
        return value


class ActivationInput(nn.Module):
    """Stands for the block before a stage's first: returns the activation received from the previous stage."""

    def __init__(self, *, tuple_length: int) -> None:
        super().__init__()
        self.tuple_length = tuple_length
        self.received: torch.Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return as_block_returns(self.received, self.tuple_length)


class Stage(nn.Module):
    """Units [first, end) of a model; tokens or an activation in, an activation or logits out."""

    def __init__(
        self,
        model: nn.Module,
        structure: ModelStructure,
        first: int,
        end: int,
        dtype: torch.dtype,
        *,
        chunk_rows: int = 0,
        compiled: bool = False,
    ) -> None:
        """`chunk_rows`: the last stage returns the summed loss, over this many positions at once, instead of logits;
        `compiled`: by a compiled softmax."""
        super().__init__()
        self.model, self.structure, self.first, self.end, self.dtype = model, structure, first, end, dtype
        self.is_first, self.is_last = first == 0, end == structure.units
        blocks = model.get_submodule(structure.blocks)
        assert isinstance(blocks, nn.ModuleList)
        length = structure.tuple_length
        by_block = [words_of(block) for block in blocks]
        for number in range(structure.count):
            if not first <= number + 1 < end:
                blocks[number] = PassThrough(tuple_length=length)
        self._leave: ActivationOutput | None = None
        if not self.is_last:
            self._leave = ActivationOutput(tuple_length=length)
            if end <= structure.count:
                blocks[end - 1] = self._leave
            else:  # all that is left to the last stage is the head
                self._leave.after(blocks[end - 2])
        self._inject: ActivationInput | None = None
        if first >= 2:
            self._inject = ActivationInput(tuple_length=length)
            blocks[first - 2] = self._inject
        elif first == 1:
            self._received: torch.Tensor | None = None
            self._enter(blocks[0])
        for number, words in enumerate(by_block):
            if not first <= number + 1 < end:
                vars(blocks[number]).update(words)
        if structure.entry and first > 0:
            entry = model.get_submodule(structure.entry)
            entry.forward = lambda *args, **kwargs: self._entered  # type: ignore[method-assign]
        self._entered: torch.Tensor | None = None
        self._embeds: torch.Tensor | None = None
        if self.is_last and not self.is_first:
            self._enter_base(model.get_submodule(str(model.base_model_prefix)))
        self.chunked: ChunkedHead | None = None
        if self.is_last and chunk_rows:
            self.chunked = ChunkedHead(model, chunk_rows, later=True, compiled=compiled)
        outside = ((0, structure.before), (structure.count + 1, structure.after))
        for unit, names in outside:
            if not first <= unit < end:
                for name in names:
                    module = model.get_submodule(name)
                    replace_module(model, name, PassThrough(embedding=isinstance(module, nn.Embedding)))

    def _enter(self, block: nn.Module) -> None:
        """Let the block take the received activation in place of what the skeleton computed before it."""
        inner = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            if args:
                return inner(self._received, *args[1:], **kwargs)
            return inner(**(kwargs | {"hidden_states": self._received}))

        block.forward = forward  # type: ignore[method-assign]

    def _enter_base(self, base: nn.Module) -> None:
        """Where the head is called with token ids, which it may pool by, give the base model the activation instead."""
        inner = base.forward
        signature = inspect.signature(inner)
        rest = [p.name for p in signature.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]

        def forward(*args: Any, **kwargs: Any) -> Any:
            if self._embeds is None:
                return inner(*args, **kwargs)
            bound = signature.bind_partial(*args, **kwargs).arguments
            for name in rest:
                bound |= bound.pop(name, {})
            return inner(**(bound | {"input_ids": None, "inputs_embeds": self._embeds}))

        base.forward = forward  # type: ignore[method-assign]

    def forward(
        self,
        value: torch.Tensor,
        *,
        targets: torch.Tensor | None = None,
        token_ids: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """`targets`: for a head that computes the loss; `token_ids`: for a head that pools by them (classification)."""
        if self.chunked is not None:
            self.chunked.targets = targets
        if self.is_first:
            inputs = {self.structure.main_input: value, **kwargs}
        else:
            if self._inject is not None:
                self._inject.received = value
            else:
                self._received = value
            kept: dict[str, Any] = {name: kwargs[name] for name in ("attention_mask", "position_ids") if name in kwargs}
            if self.structure.entry:
                self._entered, inputs = value, {self.structure.main_input: value}
            else:
                # What runs before the first block is skipped; its input only gives shape, dtype and device. A copy,
                # for some models scale their embeddings in place (CTRL).
                embeds = value.detach().clone()
                inputs = {"inputs_embeds": embeds, **kept}
            if self.is_last and not self.structure.entry:
                self._embeds = embeds if token_ids is not None else None
                inputs |= {"input_ids": token_ids, "inputs_embeds": None} if token_ids is not None else {}
        if self.is_last:
            return self.model(**inputs).logits.to(self.dtype)
        base = self.model.get_submodule(str(self.model.base_model_prefix))
        base(**inputs)
        assert self._leave is not None
        hidden = self._leave.take().to(self.dtype).contiguous()
        if hidden._is_view():
            hidden = hidden.clone()  # zero-bubble schedules detach a stage's output in place
        if torch.is_grad_enabled() and not hidden.requires_grad:
            hidden.requires_grad_()  # nothing up to here is trained, but the schedule wants to send a gradient back
        return hidden


def words_of(block: nn.Module) -> dict[str, str]:
    """A block's attributes that are words, by which models choose what they call it with (Nemotron-H: `block_type`)."""
    return {name: value for name, value in vars(block).items() if isinstance(value, str) and not name.startswith("_")}


def replace_module(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put `module` where the module of that name is; for modules with children only their own parameters go."""
    parent, _, leaf = name.rpartition(".")
    old = model.get_submodule(name)
    if any(True for _ in old.children()):
        for key in list(old._parameters):
            old._parameters[key] = None
        return
    setattr(model.get_submodule(parent), leaf, module)
