"""The state of the process: where code comes from, torch's global switches, active modes, the garbage collector."""
