"""Python effects of a step. They are found in two traces, recorded in a plan, and repeated by a program."""
