"""The zoo's entries, one module per field."""
