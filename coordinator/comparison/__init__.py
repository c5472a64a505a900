"""After the last round: training alone, every model on every facility's data, and the matrix that comes of it."""
