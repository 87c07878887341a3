"""Graphed steps inside a Lightning Trainer. The only room that imports Lightning."""

from graphplan.callback.callback import GraphPlanCallback as GraphPlanCallback
