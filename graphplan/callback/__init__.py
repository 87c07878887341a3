"""Graphed steps inside the Trainers of Lightning and of transformers. The only folder that imports either."""
