"""Checks before a run, on any machine. They list everything that keeps a step from being replayed."""
