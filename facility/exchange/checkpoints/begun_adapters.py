"""The values with which low-rank factors begin where the model of the first round has none.

A is uniform, B zero, as peft begins them (Hu et al. 2021, arXiv 2106.09685, section 4.1). A is drawn from the
federation's seed and the tensor's name, so that every facility begins with the same, and the coordinator knows with
what: the values are those that `torch.rand` gives a generator with that seed, made by NumPy, in the few bits that
every format of an update holds. So no format changes an A that nobody trains, and no server optimizer takes what it
changed for a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from facility.exchange.checkpoints.adapters import B
from facility.exchange.seeds import derive_seed

MANTISSA = 24
"""Random bits of a float32 in [0, 1)."""

BITS = 8
"""Significant bits of a bfloat16."""
LEAST = -24
"""Binary exponent of the smallest float16."""


def begun_factor(seed: int, name: str, shape: Sequence[int]) -> npt.NDArray[np.float32]:
    """The first value of the factor `name`; `seed`: the federation's."""
    if B in name:
        return np.zeros(shape, np.float32)
    draws = np.random.RandomState(derive_seed(seed, "lora", name) & 0xFFFFFFFF)
    raw = draws.randint(0, 2**32, size=tuple(shape), dtype=np.uint32)
    unit = (raw & (2**MANTISSA - 1)).astype(np.float32) * np.float32(2.0**-MANTISSA)
    bound = 1 / math.sqrt(shape[1])  # kaiming_uniform_(a=sqrt(5)) of an (r, in) matrix
    return in_any_format((unit * 2 - 1) * np.float32(bound))


def in_any_format(values: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The values, at most 1 in size, as float16, bfloat16 and float32 all hold them without another rounding: 8
    significant bits, and none below 2^-24, which float16 does not have."""
    _, exponent = np.frexp(values)
    digit = np.maximum(exponent - BITS, LEAST)
    return np.asarray(np.ldexp(np.rint(np.ldexp(values, -digit)), digit), np.float32)
