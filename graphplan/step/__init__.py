"""Graphed steps: the order of warm-up, trace, capture and replay, and the handling of refusals."""
