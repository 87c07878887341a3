"""Padding calls to capture sizes: ladders of sizes, memory to pad in, and which dimensions of a result are padded."""
