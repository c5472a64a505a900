"""What `crossfed check` looks at, one subject per module; each gives rows with what was found and how to fix it."""
