"""``python -m graphplan``."""

from graphplan.check.command import script

script()
