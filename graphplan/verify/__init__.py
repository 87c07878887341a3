"""Replays checked against eager: when, with which copies, and what counts as a difference."""

from graphplan.verify.check import Verdict as Verdict
from graphplan.verify.check import check_replay as check_replay
from graphplan.verify.check import detached as detached
from graphplan.verify.memory import find_room as find_room
from graphplan.verify.memory import free_bytes as free_bytes
from graphplan.verify.noise import Noise as Noise
from graphplan.verify.schedule import Schedule as Schedule
from graphplan.verify.schedule import Timetable as Timetable
