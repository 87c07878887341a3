"""Other libraries' training loops. Each file imports its library; nothing of the package imports these."""
