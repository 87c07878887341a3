"""Comparisons of many things at once, and moving tensors: in C++ where that was built, else in Python.

The first capture begins to build; ``python -m graphplan.compare`` builds at once.
"""
