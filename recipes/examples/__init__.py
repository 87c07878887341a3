"""Complete programs to copy: each runs alone, and imports nothing of this repository but graphplan."""
