"""Predictions as replays: any function, method or module, for changing shapes, with bounds on programs and memory."""

from graphplan.inference.graphed import Graphed as Graphed
from graphplan.inference.launches import LaunchCounter as LaunchCounter
from graphplan.inference.making import graphed as graphed
from graphplan.inference.making import piecewise as piecewise
from graphplan.inference.pool import Pool as Pool
