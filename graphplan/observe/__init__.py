"""Which code a step runs, what that code reads, and where in the source it does."""
