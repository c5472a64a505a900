"""Record-level differential privacy: units, their clipped gradients, noise."""
