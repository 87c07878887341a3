"""State of the process: the origin of code, torch's global switches, active modes, the garbage collector."""
