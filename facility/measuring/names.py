"""What `facility.measure` takes by name; apart from the code behind it, so that its command line imports no torch."""

TASKS = ("causal-lm", "masked-lm", "classification")
"""What the measured model is trained for."""
DISTRIBUTIONS = ("sky", "stimulator", "speeds")
"""Distributions that emulated devices are drawn from (`facility.measuring.emulated`)."""
