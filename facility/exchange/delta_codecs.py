"""The delta codecs by name: ways to write the difference between two models in few bytes.

A codec is one file of `facility/exchange/checkpoints/codecs`: a `DECLARATION` and the `Codec` that it names, which
works on a CPU, one part of a tensor at a time. Another package adds one by an entry point; a dotted path will not do,
for messages name their codec, and no message may choose what a receiver imports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import AfterValidator

from facility.exchange.errors import ConfigurationError
from facility.exchange.one_of import OneOf
from facility.exchange.registry import Declaration, Registry

if TYPE_CHECKING:  # what reads settings alone starts without numpy
    from numpy.typing import NDArray

    Values = NDArray[Any]
    Stored = dict[str, NDArray[Any]]

LOSSLESS_MOST = 1.05
"""Bytes of a lossless message at most, over those of the model: nothing makes random bits fewer. Of tensors of some
thousand values and more; `bytes_per_tensor` is for what the headers of smaller ones weigh."""
FULL = "full"
"""No codec: a whole checkpoint travels."""


@dataclass(frozen=True, kw_only=True)
class DeltaCodec(Declaration):
    """What is known of a codec without importing it; its implementation is a `Codec`."""

    bytes_per_value: float = 4.0
    """Of a message, for each value of the model, with the value's part of scales and the like."""
    bytes_per_sent_value: float = 0.0
    """And for each value that is sent, where a codec sends only a share of them (`sparse_density`)."""
    bytes_per_tensor: float = 200.0
    """And for each tensor: the header's entries of two fields, and what blocks that are not full take. Of small models
    most of a message."""
    selects: bool = False
    """Sends the values of largest magnitude only."""
    fading: float = 0.0
    """What a message leaves is multiplied by this, and what of it was not trained from is added to the next difference
    (error feedback); 0: training goes on from all of it."""
    least_rounds: int = 1
    """Of a federation; in fewer it does harm that was measured."""
    lossless: bool = False
    """A decoded model has the bits of the one that was encoded; for models alone, of the dtypes of the one before."""

    def message_bytes(self, values: int, density: float, tensors: int = 0) -> float:
        """Expected bytes of a message for `values` values of so many tensors, a share `density` of them sent."""
        each = self.bytes_per_value + density * self.bytes_per_sent_value
        return values * each + tensors * self.bytes_per_tensor

    def most_bytes(self, values: int, density: float, full: int, tensors: int = 0) -> float:
        """Most bytes of a message for a checkpoint of `full` bytes (lossless codecs: if all values change)."""
        if self.lossless:
            return full * LOSSLESS_MOST + tensors * self.bytes_per_tensor
        return self.message_bytes(values, density, tensors)


@dataclass(frozen=True, kw_only=True)
class Selection:
    """How a codec sends some values only: one of its fields is as long as the selected ones ask for."""

    field: str
    """Suffix of that field, the last that is read of a part."""
    length: Callable[[Values, float], int]
    """Its elements for a part's values, of which those are selected whose magnitude reaches the limit (0: none is
    given, and the codec selects as it does)."""
    stored_length: Callable[[Stored, int], int]
    """Its elements, from a part's other fields as stored, for that many values. Raises `ValueError`."""


@dataclass(frozen=True, kw_only=True)
class Blocks:
    """How the averaging pass reads a codec's messages as stored: blocks of whole numbers, each with a scale."""

    kind: str
    """The compiled code's name for it (`native.BLOCKS`)."""
    numbers: str
    """Suffix of the field with the numbers."""
    scales: str
    """Suffix of the field with a scale for each block."""
    check: Callable[[Values], None]
    """Raises `ValueError` for scales, in an array of any shape, that no encoder writes."""
    check_numbers: Callable[[Values, int], None] | None = None
    """Raises `ValueError` for numbers of a message (bytes as stored, values), where not all are fit to be read."""


@dataclass(frozen=True, kw_only=True)
class Marks:
    """How the averaging pass reads a codec's messages as stored: a bit for each value says whether it is kept. Its
    selection's field holds four bits for each kept one, its level and (the highest) its sign, in whole bytes for each
    part."""

    kind: str
    """The compiled code's name for it (`native.MARKED`)."""
    bits: str
    """Suffix of the field with a bit for each value."""
    levels: str
    """Suffix of the field with the levels, in float32."""
    levels_a_part: int
    check: Callable[[Values], None]
    """Raises `ValueError` for levels, in an array of any shape, that no encoder writes."""


@dataclass(frozen=True, kw_only=True)
class Codec:
    """How the parts of one tensor are written and read. A part begins at a multiple of `codecs.PART` elements."""

    fields: Callable[[int, int], list[tuple[str, str, int]]]
    """(elements of a tensor, length of the selection's field) -> what it is stored as: (suffix, dtype, length)."""
    encode: Callable[[Values, float], Stored]
    """(float32 values of a part, the limit of a codec that selects, else 0) -> array by suffix."""
    decode: Callable[[Stored, int], Values]
    """(arrays of a part, its number of values) -> float32 values. Raises `ValueError` for what no encoder writes."""
    selection: Selection | None = None
    of_bits: bool = False
    """Of a lossless codec: values are no float32 differences but those of the whole numbers that hold the two models'
    values, as they are stored, signed and wrapping around; encoded from integers of that size, decoded to int64."""
    blocks: Blocks | None = None
    marks: Marks | None = None


CODECS = Registry(
    kind="delta codec",
    package="facility.exchange.checkpoints.codecs",
    entry_points="crossfed.codecs",
    declaration=DeltaCodec,
)


def declared_codec(name: str) -> DeltaCodec:
    """The codec of that name. Raises `ConfigurationError` for any other, dotted paths included."""
    if name not in CODECS.names():
        raise ConfigurationError(f"encoding is {name!r}, expected one of {', '.join(encodings())}")
    return CODECS.get(name)


def fading_of(encoding: str) -> float:
    """`DeltaCodec.fading` of an encoding; 0 where a whole checkpoint travels."""
    return 0.0 if encoding == FULL else declared_codec(encoding).fading


def trained_from(encoding: str, unsent_share: float) -> float:
    """The share of what earlier messages left that training begins with: `unsent_share` of an encoding that fades, else
    all of it."""
    return unsent_share if fading_of(encoding) else 1.0


def load_codec(name: str) -> Codec:
    """The codec of that name, imported. Raises `ConfigurationError`."""
    declared_codec(name)
    codec = CODECS.load(name)
    assert isinstance(codec, Codec), f"{name} is {codec!r}, expected a Codec"
    return codec


def encodings() -> tuple[str, ...]:
    """What `encoding` may be."""
    return (FULL, *CODECS.names())


def _checked(name: str) -> str:
    if name not in encodings():
        raise ValueError(f"expected one of {', '.join(map(repr, encodings()))}")
    return name


Encoding = Annotated[str, OneOf(encodings(), own=False), AfterValidator(_checked)]
"""A whole checkpoint, or the difference to one that the receiver holds (`facility.exchange.checkpoints.delta`)."""
