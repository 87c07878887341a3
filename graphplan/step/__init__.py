"""Graphed steps: the order of warm-up, trace, capture and replay, and what happens when one of them refuses."""

from graphplan.step.bare import capture as capture
from graphplan.step.bare import compile_cached as compile_cached
from graphplan.step.bare import compile_plan as compile_plan
from graphplan.step.compiling import CompiledModules as CompiledModules
from graphplan.step.gate import AGAIN as AGAIN
from graphplan.step.gate import Clock as Clock
from graphplan.step.gate import Gate as Gate
from graphplan.step.graphed import GraphedStep as GraphedStep
from graphplan.step.making import graph_step as graph_step
from graphplan.step.making import step_class as step_class
from graphplan.step.methods import Method as Method
from graphplan.step.methods import owners_of as owners_of
from graphplan.step.options import Options as Options
from graphplan.step.peers import Peers as Peers
from graphplan.step.peers import find_peers as find_peers
from graphplan.step.runner import Backends as Backends
from graphplan.step.served import ServedStep as ServedStep
from graphplan.step.turn import runs_within_step as runs_within_step
