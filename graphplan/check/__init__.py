"""A look before the run: what keeps a step from being replayed, found on any machine, all at once."""
