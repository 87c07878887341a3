"""From two traces and the owners to a :class:`Plan`."""

from graphplan.compiler.alike import build_plan_like as build_plan_like
from graphplan.compiler.between import changed_between as changed_between
from graphplan.compiler.build import build_plan as build_plan
from graphplan.compiler.build import find_device as find_device
from graphplan.compiler.difference import check_difference as check_difference
from graphplan.compiler.difference import is_reordered as is_reordered
from graphplan.compiler.effects import is_allowed as is_allowed
from graphplan.compiler.host import check_threads as check_threads
