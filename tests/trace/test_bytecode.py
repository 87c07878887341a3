"""Instructions of code are those that ``dis`` finds, in one form."""

from __future__ import annotations

import argparse
import asyncio.base_events
import dis
import inspect
import typing
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, ModuleType
from typing import Any

import pytest
import torch

from graphplan.observe.bytecode import instructions_of, loads_callee, plain_instructions

_PADDING = ("CACHE", "EXTENDED_ARG", "NOP", "RESUME", "PRECALL", "PUSH_NULL", "NOT_TAKEN")
_LARGE = "\n".join(["def f(x):", "    while x:", *(f"        x.name_{n} += {n}.5" for n in range(300)), "    return x"])
"""Names, constants and jumps of more than 256: with prefixes."""


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def _source(module: ModuleType) -> str:
    assert module.__file__ is not None
    return Path(module.__file__).read_text(encoding="utf8")


def _plain(code: CodeType) -> list[tuple[Any, ...]]:
    """Of ``dis``: names of instructions, what their arguments stand for, and where they are."""
    found: list[tuple[Any, ...]] = []
    for step in dis.get_instructions(code):
        name, value = step.opname, step.argval
        if name in _PADDING:
            continue
        if name.count("_FAST") > 1:
            acts = [part for part in name.split("_") if part in ("LOAD", "STORE")]
            found += [(f"{act}_FAST", each, step.offset) for act, each in zip(acts, value, strict=True)]
        else:
            found.append(("LOAD_FAST" if name.startswith("LOAD_FAST") else name, value, step.offset))
    return found


_TOLD_IN_WORDS = {"COMPARE_OP", "FORMAT_VALUE", "CONVERT_VALUE", "KW_NAMES", "LOAD_COMMON_CONSTANT", "BINARY_OP"}
"""Instructions of whose arguments ``dis`` says in words what they do, and not in each version."""


@pytest.mark.parametrize("module", [argparse, asyncio.base_events, inspect, typing, torch.nn.modules.module])
def test_they_are_those_of_dis(module: ModuleType) -> None:
    codes = list(_codes(compile(_source(module), "module.py", "exec")))
    assert len(codes) > 50
    for code in codes:
        own = [(step.opname, step.argval, step.offset) for step in plain_instructions(code)]
        for mine, other in zip(own, _plain(code), strict=True):
            assert mine[::2] == other[::2]
            assert mine[0] in _TOLD_IN_WORDS or repr(mine[1]) == repr(other[1])


def test_large_arguments_are_put_together() -> None:
    (code,) = (code for code in _codes(compile(_LARGE, "large.py", "exec")) if code.co_name == "f")
    assert len(code.co_names) == 300
    assert "EXTENDED_ARG" in {step.opname for step in dis.get_instructions(code)}
    own = [
        (step.opname, step.argval, step.offset)
        for step in plain_instructions(code)
        if step.opname not in _TOLD_IN_WORDS
    ]
    assert own == [step for step in _plain(code) if step[0] not in _TOLD_IN_WORDS]
    assert {step.argval for step in plain_instructions(code) if step.opname == "STORE_ATTR"} == set(code.co_names)


def test_what_is_loaded_to_be_called_is_told() -> None:
    for code in _codes(compile(_source(inspect), "inspect.py", "exec")):
        of_dis = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "EXTENDED_ARG")]
        for own, other in zip(instructions_of(code), of_dis, strict=True):
            assert own.arg == other.arg
            # As ``dis`` writes it: "NULL + name", since Python 3.12 also of attributes.
            marked = own.opname in ("LOAD_GLOBAL", "LOAD_ATTR") and "NULL" in other.argrepr
            assert loads_callee(own) == marked
