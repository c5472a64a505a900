"""What a model asks of a rank that trains it, from its checkpoint's shapes and a facility's settings."""
