"""Random training runs: models, steps, and what happens between two calls of a step."""
