"""What `crossfed check` looks at, a subject a module; each gives rows with what was found and how to mend it."""
