"""The arguments of a step: their signature, their containers, values that the step does not read, static buffers."""
