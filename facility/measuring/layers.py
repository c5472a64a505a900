"""Seconds and bytes of every kind of unit of a model on this device, by running it."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from facility.exchange.errors import InputError
from facility.exchange.messages.emulation import Emulation
from facility.measuring.names import TASKS
from facility.measuring.profile import UnitSizes, UnitTimes
from facility.training.data.tasks import CausalLM, Classification, MaskedLM, Task
from facility.training.devices import synchronize
from facility.training.model import build_base_model, choose_attention, read_config
from facility.training.parallel.split import Stage, inspect_model
from facility.training.parallel.structure import ModelStructure


@dataclass(frozen=True, kw_only=True)
class LayerSettings:
    """What to run."""

    tokens: int
    """Length of a sequence (a sample)."""
    samples: tuple[int, ...] = (1, 2)
    """Micro-batch sizes."""
    dtype: torch.dtype = torch.float32
    """Dtype of forward and backward."""
    warmup: int = 2
    repeats: int = 5
    cpu_seconds: bool = False
    """Count this process's CPU time instead of the clock's: for rehearsals whose ranks share the cores."""
    task: str = "causal-lm"
    """What the model is trained for: causal-lm, masked-lm or classification."""


@dataclass(frozen=True, kw_only=True)
class MeasuredUnits:
    """The model's chain on this device."""

    chain: tuple[str, ...]
    sizes: tuple[UnitSizes, ...]
    times: tuple[UnitTimes, ...]
    optimizer_seconds: dict[str, float]
    """Kind -> one AdamW step."""


@dataclass
class _Clock:
    """Times a call on this device, slowed down as the emulation says."""

    device: torch.device
    emulation: Emulation
    worker: int
    cpu_seconds: bool = False
    draws: int = 0

    def seconds(self, call: Callable[[], Any]) -> tuple[float, Any]:
        synchronize(self.device)
        begin, busy = time.perf_counter(), time.process_time()
        result = call()
        synchronize(self.device)
        real = time.process_time() - busy if self.cpu_seconds else time.perf_counter() - begin
        wanted = self.emulation.duration(self.worker, real, self.draws)
        self.draws += 1
        if wanted <= real:
            return real, result
        rested = time.perf_counter()
        time.sleep(wanted - real)
        return real + time.perf_counter() - rested, result


def kinds_of_blocks(blocks: nn.ModuleList, config: Any) -> list[str]:
    """Name of every block's kind: blocks are alike if class, parameter shapes and declared layer type are."""
    declared = getattr(config, "layer_types", None) or [""] * len(blocks)
    signatures = [
        (type(block).__name__, str(declared[n]), tuple((k, tuple(p.shape)) for k, p in block.named_parameters()))
        for n, block in enumerate(blocks)
    ]
    distinct = list(dict.fromkeys(signatures))
    if len(distinct) == 1:
        return ["block"] * len(blocks)
    return [f"block {distinct.index(s)}" + (f" ({s[1]})" if s[1] else "") for s in signatures]


def measure_units(
    model: Path, device: torch.device, settings: LayerSettings, *, emulation: Emulation | None, worker: int
) -> MeasuredUnits:
    """Time one unit of every kind of the checkpoint's model. Weights are random: only shapes matter."""
    config = read_config(model)
    task = _task(settings.task)
    attention = choose_attention(config, task.factory, device, settings.dtype)
    structure = inspect_model(config, task.factory, attention.name, settings.tokens)
    skeleton = build_base_model(config, task.factory, attention)
    blocks = skeleton.get_submodule(structure.blocks)
    assert isinstance(blocks, nn.ModuleList)
    kinds = kinds_of_blocks(blocks, config)
    chain = ("embedding", *kinds, "head")
    clock = _Clock(device, emulation or Emulation(), worker, settings.cpu_seconds)
    sizes, times, steps = [], [], {}
    for kind in dict.fromkeys(chain):
        places = [unit for unit, name in enumerate(chain) if name == kind]
        unit = places[1] if len(places) > 1 else places[0]  # not the very first block, where there are others
        stage = Stage(copy.deepcopy(skeleton), structure, unit, unit + 1, _output(settings, unit, structure))
        _fill(stage, device)
        run = Unit(stage, unit, structure, settings, device, task)
        size, seconds, steps[kind] = run.measure(kind, clock)
        sizes.append(size)
        times.append(seconds)
        del stage, run
    return MeasuredUnits(chain=chain, sizes=tuple(sizes), times=tuple(times), optimizer_seconds=steps)


def a_block(model: Path, device: torch.device, settings: LayerSettings) -> Unit:
    """A block of the checkpoint's model, ready to be run: not the very first one, where there are others."""
    config = read_config(model)
    task = _task(settings.task)
    attention = choose_attention(config, task.factory, device, settings.dtype)
    structure = inspect_model(config, task.factory, attention.name, settings.tokens)
    unit = min(2, structure.count)
    stage = Stage(build_base_model(config, task.factory, attention), structure, unit, unit + 1, settings.dtype)
    _fill(stage, device)
    return Unit(stage, unit, structure, settings, device, task)


def _task(name: str) -> Task:
    """The task's model and loss; nothing is drawn, so what drawing would need is left out."""
    if name not in TASKS:
        raise InputError(f"no task is called {name!r}; there are {', '.join(TASKS)}")
    if name == "classification":
        return Classification(token_types=False)
    return CausalLM() if name == "causal-lm" else MaskedLM(0, 1, ())


def _output(settings: LayerSettings, unit: int, structure: ModelStructure) -> torch.dtype:
    return torch.float32 if unit == structure.units - 1 else settings.dtype


def _fill(module: nn.Module, device: torch.device) -> None:
    """Give parameters memory and small random values; buffers move as they are."""
    generator = torch.Generator().manual_seed(0)
    for part in module.modules():
        for name, parameter in list(part._parameters.items()):
            if parameter is not None:
                values = torch.empty(parameter.shape).normal_(0, 0.02, generator=generator)
                part._parameters[name] = nn.Parameter(values.to(device), requires_grad=parameter.requires_grad)
        for name, buffer in list(part._buffers.items()):
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
    module.train()


class Unit:
    """One unit, ready to be run forwards and backwards."""

    def __init__(
        self,
        stage: Stage,
        unit: int,
        structure: ModelStructure,
        settings: LayerSettings,
        device: torch.device,
        task: Task,
    ) -> None:
        self.stage, self.unit, self.structure, self.settings = stage, unit, structure, settings
        self.device, self.task = device, task
        self.vocabulary = int(getattr(stage.model.config, "vocab_size", 2))
        self.parameters = [p for p in stage.parameters() if p.requires_grad]

    def measure(self, kind: str, clock: _Clock) -> tuple[UnitSizes, UnitTimes, float]:
        """Median forward and backward for every micro-batch size; bytes from the largest one."""
        forwards, backwards = [], []
        stored = 0.0
        for samples in self.settings.samples:
            call, gradient = self.prepared(samples)
            ahead, back = [], []
            for number in range(self.settings.warmup + self.settings.repeats):
                self.forget()
                forward, output = clock.seconds(call)
                loss = gradient(output)
                backward, _ = clock.seconds(loss)
                if number >= self.settings.warmup:
                    ahead.append(forward)
                    back.append(backward)
            forwards.append(statistics.median(ahead))
            backwards.append(statistics.median(back))
            stored = self._stored(call) / samples
        state, step = self._optimizer(call, gradient)
        tokens, width = self.settings.tokens, self.settings.dtype.itemsize
        last = self.unit == self.structure.units - 1
        return (
            UnitSizes(
                kind=kind,
                parameter_bytes=4.0 * sum(p.numel() for p in self.parameters),
                state_bytes=state,
                activation_bytes=0.0 if last else float(tokens * self.structure.hidden * width),
                stored_bytes=stored,
            ),
            UnitTimes(
                kind=kind,
                samples=self.settings.samples,
                forward_seconds=tuple(forwards),
                backward_seconds=tuple(backwards),
            ),
            step,
        )

    @property
    def block(self) -> nn.Module:
        """The block that this unit is (not for the first and the last unit)."""
        blocks = self.stage.model.get_submodule(self.structure.blocks)
        assert isinstance(blocks, nn.ModuleList)
        return blocks[self.unit - 1]

    def forget(self) -> None:
        for parameter in self.stage.parameters():
            parameter.grad = None

    def _casting(self) -> AbstractContextManager[Any]:
        if self.settings.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, dtype=self.settings.dtype)

    def prepared(self, samples: int) -> tuple[Callable[[], Any], Callable[[torch.Tensor], Callable[[], Any]]]:
        """(run forward, from its output to a call that runs backward)."""
        shape = (samples, self.settings.tokens)
        ids = torch.randint(0, self.vocabulary, shape, generator=torch.Generator().manual_seed(1)).to(self.device)
        hidden = torch.randn(*shape, self.structure.hidden, dtype=self.settings.dtype, device=self.device)
        hidden.requires_grad_()
        if self.unit == 0:
            call = self._whole(ids)
        elif self.unit == self.structure.units - 1:
            forward = self._whole(hidden)

            def call() -> torch.Tensor:
                logits = forward()
                return self.task.loss_sum(logits, ids if logits.dim() == 3 else torch.zeros_like(ids[:, 0]))
        else:
            call = self._block(hidden)

        def gradient(output: torch.Tensor) -> Callable[[], Any]:
            ones = torch.ones_like(output)
            return lambda: output.backward(ones)

        return call, gradient

    def _whole(self, value: torch.Tensor) -> Callable[[], torch.Tensor]:
        def call() -> torch.Tensor:
            with self._casting():
                return self.stage(value)

        return call

    def _block(self, hidden: torch.Tensor) -> Callable[[], torch.Tensor]:
        """The block alone: what the model around it computes for every block alike is caught once and left out."""
        block = self.block
        caught: list[tuple[tuple[Any, ...], dict[str, Any]]] = []

        def catch(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            caught.append((args, kwargs))

        handle = block.register_forward_pre_hook(catch, with_kwargs=True)
        with torch.no_grad(), self._casting():
            self.stage(hidden)
        handle.remove()
        if not caught:
            raise InputError(f"{type(self.stage.model).__name__} never runs block {self.unit - 1}; cannot measure it")
        args, kwargs = caught[0]
        if hasattr(self.stage, "_received"):
            self.stage._received = hidden
        if args:
            args = (hidden, *args[1:])
        else:
            kwargs = {**kwargs, "hidden_states": hidden}

        def call() -> torch.Tensor:
            with self._casting():
                output = block(*args, **kwargs)
            return output[0] if isinstance(output, tuple) else output

        return call

    def _stored(self, call: Callable[[], Any]) -> float:
        """Bytes that autograd keeps for the backward, parameters excepted."""
        own = {p.untyped_storage().data_ptr() for p in self.stage.parameters()}
        own |= {b.untyped_storage().data_ptr() for b in self.stage.buffers()}
        found: dict[int, int] = {}
        kept: list[torch.Tensor] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                found[storage.data_ptr()] = storage.nbytes()
                kept.append(tensor)  # so that no address is used twice
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = call()
        del output
        return float(sum(found.values()))

    def _optimizer(
        self, call: Callable[[], Any], gradient: Callable[[torch.Tensor], Callable[[], Any]]
    ) -> tuple[float, float]:
        """(bytes of parameters, gradients and AdamW's state, seconds of a step)."""
        if not self.parameters:
            return 0.0, 0.0
        gradient(call())()
        optimizer = torch.optim.AdamW(self.parameters)
        optimizer.step()
        begin = time.perf_counter()
        optimizer.step()
        synchronize(self.device)
        seconds = time.perf_counter() - begin
        state = sum(
            value.numel() * value.element_size()
            for values in optimizer.state.values()
            for value in values.values()
            if isinstance(value, torch.Tensor)
        )
        held = sum(p.numel() * p.element_size() for p in self.parameters)
        graded = sum(p.grad.numel() * p.grad.element_size() for p in self.parameters if p.grad is not None)
        return float(state + held + graded), seconds
