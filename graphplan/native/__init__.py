"""Guards in C++, where somebody has built them: ``python -m graphplan.native``. Else the same is done in Python."""

from graphplan.native.building import build as build
from graphplan.native.building import find as find
from graphplan.native.building import load as load
