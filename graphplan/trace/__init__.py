"""Tracing one real step: its operators, the tensors it takes from outside, and what it leaves changed.

A trace states facts and decides nothing: :mod:`graphplan.plan` compares two traces.
"""
