"""Making optimizers capturable, and keeping learning rates and skipped steps on the device while a step runs."""
