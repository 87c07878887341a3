"""Predictions as replays: any function, method or module, for changing shapes, with bounds on programs and memory."""
