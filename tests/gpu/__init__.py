"""Tests that need a CUDA device: the step is captured as a real graph there."""
