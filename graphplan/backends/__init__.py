"""What records a step's device work once and runs it again: CUDA graphs, and the tape."""
