"""Graphed steps in Lightning's loop over training batches."""
