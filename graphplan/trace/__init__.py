"""Tracing one real step: it states facts and decides nothing; :mod:`graphplan.plan` compares two traces."""
