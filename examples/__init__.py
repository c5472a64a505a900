"""Programs that pages of the documentation name: `python -m examples.NAME`."""
