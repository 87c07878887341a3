"""Tensors and containers of tensors: trees, attributes of tensors, DTensors, memory, and copies of many at once."""
