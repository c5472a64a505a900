"""The commands of `crossfed`, one module a panel of its help; each is a thin call into a module of its own."""
