"""Logging from a step. Loggers and progress bars get the values without host synchronization."""
