"""Graphed steps inside a Lightning Trainer. The only room that imports Lightning."""
