"""How updates become the next model: the streaming kernel, the rules (one file each), screens and records."""
