"""Replayed predictions of any function, method or module, for changing shapes, with limits on programs and memory."""
