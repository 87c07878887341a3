"""Guards in C++ where they were built, which the first capture begins, and ``python -m graphplan.native`` does at once.
Else the same is done in Python.
"""

from graphplan.native.building import build as build
from graphplan.native.building import build_later as build_later
from graphplan.native.building import find as find
from graphplan.native.building import load as load
from graphplan.native.building import state as state
