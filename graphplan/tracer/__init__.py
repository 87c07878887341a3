"""Tracing one real step: its operators, the tensors it takes from outside, and what it leaves changed.

The tracer states facts and decides nothing: :mod:`graphplan.compiler` compares two traces.
"""

from graphplan.tracer.arguments import HIDDEN_WRITES as HIDDEN_WRITES
from graphplan.tracer.arguments import Schema as Schema
from graphplan.tracer.arguments import schema_of as schema_of
from graphplan.tracer.arguments import tensors_in as tensors_in
from graphplan.tracer.arguments import written_tensors as written_tensors
from graphplan.tracer.changes import Changes as Changes
from graphplan.tracer.changes import Place as Place
from graphplan.tracer.changes import Recorder as Recorder
from graphplan.tracer.changes import is_alike as is_alike
from graphplan.tracer.changes import place_of as place_of
from graphplan.tracer.changes import same_value as same_value
from graphplan.tracer.collectives import finish as finish
from graphplan.tracer.collectives import is_collective as is_collective
from graphplan.tracer.collectives import wait_for as wait_for
from graphplan.tracer.composites import OperatorMode as OperatorMode
from graphplan.tracer.constants import DeviceConstants as DeviceConstants
from graphplan.tracer.host_reads import AnsweredReads as AnsweredReads
from graphplan.tracer.host_reads import HostRead as HostRead
from graphplan.tracer.host_reads import KnownReads as KnownReads
from graphplan.tracer.host_reads import find_place as find_place
from graphplan.tracer.memory import MemoryWatch as MemoryWatch
from graphplan.tracer.mode import is_traced as is_traced
from graphplan.tracer.mode import refuse_trace as refuse_trace
from graphplan.tracer.mode import watch_memory as watch_memory
from graphplan.tracer.profile import Profile as Profile
from graphplan.tracer.records import Operator as Operator
from graphplan.tracer.records import Trace as Trace
from graphplan.tracer.records import TracedExternal as TracedExternal
from graphplan.tracer.records import rounding_of as rounding_of
from graphplan.tracer.run import trace as trace
from graphplan.tracer.source import Source as Source
from graphplan.tracer.source import find_raise as find_raise
from graphplan.tracer.source import find_source as find_source
from graphplan.tracer.source import is_raised_by_user as is_raised_by_user
from graphplan.tracer.source import runs_step as runs_step
from graphplan.tracer.spaces import Ran as Ran
from graphplan.tracer.watching import Aside as Aside
