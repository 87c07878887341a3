"""Descriptions without tensor data: the roles of a step's externals, and the policies that say which are copied in."""
