"""Graphed steps inside a Lightning Trainer. The only folder that imports Lightning."""
