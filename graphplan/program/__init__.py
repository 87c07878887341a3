"""A program: a plan under a policy, with its buffers and one backend's recording."""

from graphplan.program.capture import capture_program as capture_program
from graphplan.program.program import NO_CHECK as NO_CHECK
from graphplan.program.program import Program as Program
