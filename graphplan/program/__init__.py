"""A program: a plan under a policy, with its buffers and one backend's recording."""

from graphplan.program.capture import capture_program as capture_program
from graphplan.program.capture import is_recorded as is_recorded
from graphplan.program.capture import outdated as outdated
from graphplan.program.inputs import MEMORY_IS_FED as MEMORY_IS_FED
from graphplan.program.leases import Lease as Lease
from graphplan.program.leases import StaticOutput as StaticOutput
from graphplan.program.leases import plain as plain
from graphplan.program.program import NO_CHECK as NO_CHECK
from graphplan.program.program import Program as Program
from graphplan.program.program import Tally as Tally
from graphplan.program.together import settle_companions as settle_companions
from graphplan.program.watching import WATCHERS as WATCHERS
