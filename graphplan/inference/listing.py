"""The cache of a graphed function as text, and the bytes that it takes, by what they are for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from graphplan.program.program import Program
from graphplan.step.capture_sizes import ShapeStats

_MIB = 2**20


def list_programs(shapes: ShapeStats, memory: Memory, programs: Sequence[Program]) -> list[str]:
    """Hits and misses, padding, bytes by role, and a line for each program."""
    lines = [f"  shapes: {shapes.hits} hits, {shapes.misses} misses"]
    if shapes.capture_sizes:
        lines.append(f"  {shapes}")
    roles = {"input": memory.input, "param": memory.param, "state": memory.state, "output": memory.output}
    sizes = ", ".join(f"{name} {size / _MIB:.1f} MiB" for name, size in roles.items() if size)
    lines.append(f"  memory: {sizes or 'nothing'}; the pool of {len(programs)} programs {memory.pool / _MIB:.1f} MiB")
    for program in sorted(programs, key=lambda program: -program.nbytes):
        inputs = ", ".join(f"{external.name} {external.spec}" for external in program.plan.inputs)
        lines.append(
            f"  program: {inputs or 'no inputs'}: {program.replays} replays, {program.plan.launches} operators, "
            f"{program.nbytes / _MIB:.1f} MiB"
        )
    return lines


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes by what they are for. ``input`` is one allocation per input for all shapes, ``param`` what the programs use
    of the owners' or copy of it, ``state`` what they carry, ``output`` what is lent (``outputs="static"``), ``pool``
    what the programs compute in.
    """

    input: int
    param: int
    state: int
    output: int
    pool: int
