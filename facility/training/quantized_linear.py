"""A frozen linear layer whose weight is held in 4 bits, as QLoRA's base layers are.

T. Dettmers et al., "QLoRA: efficient finetuning of quantized LLMs", NeurIPS 2023, arXiv 2305.14314: 64 neighbours of
a row share a scale (section 3: 4-bit NormalFloat), and 256 scales are held in 8 bits by one of their own (double
quantization). The arithmetic is that of bitsandbytes, which peft uses. Weight and scales lie in rows of bytes, one row
an output, so that FSDP2 shards them as it shards any weight.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from facility.exchange.errors import InputError
from facility.exchange.messages.layout import QUANTIZED_BLOCK, SCALES_BLOCK


@functools.cache
def code_of_scales(device: torch.device) -> torch.Tensor:
    """The 256 values that a scale's 8 bits stand for."""
    from bitsandbytes.functional import create_dynamic_map

    return create_dynamic_map().to(device)


class QuantizedLinear(nn.Module):
    """Takes the place of a `Linear` of which only the bias, if any, is a float any more."""

    scales_scale: torch.Tensor
    scales_mean: torch.Tensor

    def __init__(self, name: str, linear: nn.Linear, *, kind: str, double: bool, compute_dtype: torch.dtype) -> None:
        """Bytes are allocated where the linear layer's weight lies. `kind`: nf4 or fp4."""
        super().__init__()
        self.name, self.kind, self.nested, self.compute_dtype = name, kind, double, compute_dtype
        self.out_features, self.in_features = linear.out_features, linear.in_features
        rows, device = linear.out_features, linear.weight.device
        scales = linear.in_features // QUANTIZED_BLOCK
        self.packed = frozen_bytes(rows, linear.in_features // 2, device)
        self.scales = frozen_bytes(rows, scales * (1 if double else 4), device)
        self.bias = linear.bias
        if double:
            self.register_buffer("scales_scale", torch.zeros(-(-rows * scales // SCALES_BLOCK)), persistent=False)
            self.register_buffer("scales_mean", torch.zeros(()), persistent=False)

    @property
    def weight(self) -> torch.Tensor:
        """There is none: raises `InputError`, for a model that does not call the layer."""
        raise InputError(
            f"the model uses the weight of {self.name} without calling the layer, which a quantised base does not "
            "allow: set training.lora.quantize_base to none"
        )

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        import bitsandbytes

        bias = None if self.bias is None else self.bias.to(self.compute_dtype)
        return bitsandbytes.matmul_4bit(
            inputs.to(self.compute_dtype), self.packed.view(-1, 1), quant_state=self._state(), bias=bias
        )

    def _state(self) -> Any:
        """What bitsandbytes needs beside the packed weight: views of what this rank holds gathered now."""
        from bitsandbytes.functional import QuantState

        shape = torch.Size((self.out_features, self.in_features))
        common = {"shape": shape, "blocksize": QUANTIZED_BLOCK, "quant_type": self.kind, "dtype": self.compute_dtype}
        if not self.nested:
            return QuantState(absmax=self.scales.view(torch.float32).view(-1), **common)
        code = code_of_scales(self.scales_scale.device)
        outer = QuantState(absmax=self.scales_scale, blocksize=SCALES_BLOCK, code=code, dtype=torch.float32)
        return QuantState(absmax=self.scales.view(-1), offset=self.scales_mean, state2=outer, **common)

    @torch.no_grad()
    def hold(self, weight: torch.Tensor, packed: torch.Tensor, scales: torch.Tensor, first: int) -> None:
        """Quantise the whole weight and keep, in `packed` and `scales`, the rows that lie here, from `first` on.

        Every rank quantises the whole, since scales are quantised across rows.
        """
        from bitsandbytes.functional import quantize_4bit

        values, state = quantize_4bit(
            weight.to(self.compute_dtype),
            blocksize=QUANTIZED_BLOCK,
            quant_type=self.kind,
            compress_statistics=self.nested,
        )
        rows = slice(first, first + packed.shape[0])
        packed.copy_(values.view(self.out_features, -1)[rows])
        scales.copy_(state.absmax.view(self.out_features, -1).view(torch.uint8)[rows])
        if self.nested:
            self.scales_scale.copy_(state.state2.absmax)
            self.scales_mean.copy_(state.offset)


def frozen_bytes(rows: int, columns: int, device: torch.device) -> nn.Parameter:
    """An uninitialised parameter of bytes without a gradient: (rows, columns), uint8."""
    return nn.Parameter(torch.empty(rows, columns, dtype=torch.uint8, device=device), requires_grad=False)
