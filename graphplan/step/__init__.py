"""Graphed steps: the order of warm-up, trace, capture and replay, and what happens when one of them refuses."""
