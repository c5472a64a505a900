"""Delta codecs, one file each: ways to write the difference between two models in few bytes."""

PART = 1 << 16
"""Elements of a tensor that are encoded at a time; every codec's block divides it."""
