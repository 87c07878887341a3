"""Python effects of a step: found in two traces, recorded in a plan, and repeated by a program."""
