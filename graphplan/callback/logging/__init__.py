"""What a step logs, and how loggers and progress bars get it without waiting for the device."""
