"""Bytes that a graphed function takes, by what they are for."""

from __future__ import annotations

from dataclasses import dataclass


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
