"""The trace of one real step. It only records facts; :mod:`graphplan.plan` compares two traces and decides."""
