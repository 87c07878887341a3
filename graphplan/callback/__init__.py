"""Graphed steps inside the Trainers of Lightning and transformers. Only this folder imports either library."""
