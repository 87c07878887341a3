"""Tensors and containers of tensors: trees, tensor attributes, DTensors, storages, and batched copies."""
