"""Graphed functions: calls, shapes, buckets, pieces."""
