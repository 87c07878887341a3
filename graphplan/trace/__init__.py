"""Traces one real step. A trace only records facts; :mod:`graphplan.plan` compares two traces and decides."""
