"""Checkpoints on disk: safetensors reading and writing, delta codecs, dtype arithmetic."""
