"""Compare many values at once, and copy tensors: in C++ if the extension was built, else in Python.

The first capture starts the build; ``python -m graphplan.compare`` builds at once.
"""
