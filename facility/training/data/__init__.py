"""From a prepared dataset to the batches of a step, and what a task makes of them."""
