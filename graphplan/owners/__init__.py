"""Owners: find them, walk and name the tensors and Python values that they hold, and restore these."""
