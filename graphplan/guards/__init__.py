"""Is what a program depends on still where it was?"""

from graphplan.guards.guards import Guards as Guards
