"""Backends, which record a step's device work once and replay it: CUDA graphs and the tape."""
