"""Calls that are padded to capture sizes."""
