"""Descriptions that hold no tensors: the roles of a step's externals, and the policy that says what is copied in."""
