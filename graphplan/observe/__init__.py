"""Record which code a step runs, which values that code reads, and on which source lines."""
