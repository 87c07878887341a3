"""Make optimizers capturable, and keep learning rates and decisions to skip a step on the device."""
