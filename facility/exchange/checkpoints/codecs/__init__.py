"""Ways to write the difference between two models in few bytes, on a CPU, one part of a tensor at a time.

A part begins at a multiple of PART elements. A codec offers

    fields(elements, kept)  what one tensor is stored as: (suffix, dtype, length)
    encode(values)          float32 values of a part -> array by suffix
    decode(fields, count)   arrays of a part -> float32 values; raises ValueError for what no encoder writes
"""

PART = 1 << 16
"""Elements; every codec's block divides it."""
