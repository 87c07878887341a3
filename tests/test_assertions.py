"""Values that code reads only to assert them: steps are captured, and eager steps and checks assert."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphplan import HostSyncError, RefusalError, graph_step, graphed

ASSERTED = r"""
assert x
assert x, f"bad {x.item()}"
assert x.item()
assert x.item() > 0
assert x.min() >= 0 and x.max() < 5
assert 0 <= x.item() <= 3
assert not (x.item() < 0 or x.item() > 4)
assert float(x) > 0, float(x)
assert bool(x) is True
assert math.isfinite(x.item())
assert math.isfinite(x)
assert torch.allclose(x, x)
assert torch.equal(x, x), "no"
assert x in torch.arange(3)
assert abs(int(x)) < 5
if not x: raise ValueError("no")
if not (x > 0).all(): raise ValueError("no")
if torch.any(x < 0): raise ValueError
if torch.any(x < 0) or torch.any(x > 3): raise ValueError
if x > 3: raise ValueError(f"bad {x.item():.3f} {3!r}")
if x.item() > 3 or x.item() < 0: raise ValueError
if x.item() != 1: raise RuntimeError("a" + str(x.item()))
v = x.item()\nif v > 3: raise ValueError(f"{v}")
v = x.item()\nif v > 3 or v < 0: raise ValueError("%s" % v)
v = x.item()\nif v > 3:\n    msg = f"{v}"\n    raise ValueError(msg)
v = x.item()\nmsg = f"bad {v}"\nassert v < 3, msg
v = int(x)\nif v < 0 and flag: raise ValueError(v)
a, b = x.item(), x.item()\nassert a <= b
n = x.item() + 1\nassert n == 2
for i in range(2):\n    if not x: raise ValueError(i)
for i in range(2):\n    assert x.item() >= i, (x, i)
with torch.no_grad():\n    assert x
try:\n    assert x\nfinally:\n    z = 1
if x.item() == 1: pass\nelse: raise ValueError
assert helper(x)
assert helper2(x) > 0
if not helper(x): raise ValueError(helper2(x))
check(x)
while not x: raise ValueError
assert all(y.item() > 0 for y in [x, x])
assert max([y.item() for y in [x, x]]) < 3
if any(y.item() > 3 for y in [x]): raise ValueError
assert x.item() in (1, 2)
assert x.item() == 1 if flag else True
if flag and not x: raise ValueError
if x > 1 or flag is None: raise ValueError
try:\n    assert x\nexcept AssertionError as e:\n    raise ValueError("no") from e
try:\n    assert x\nexcept KeyError:\n    z = 2
try:\n    check(x)\nexcept ZeroDivisionError:\n    z = 2
v = x.item()\nw = v * 2\nassert w == 2\nv = 3\nz = v
assert type(x.item()) is float
assert len(str(x.item())) < 9
assert isinstance(x.item(), float)
if not x:\n    if flag: raise ValueError(1)\n    raise KeyError(2)
if not x:\n    for i in range(3): log(i)\n    raise ValueError(1)
torch._check(x.item() > 0, lambda: "no")
torch._check_tensor_all(x > 0)
torch._check_value(bool(x > 0))
"""
COMPUTED = r"""
x.item()
float(x)
if x: log(1)
if x: log(1)\nelse: log(2)
if x > 3: log(1)
if not x: return x
if x: return x
z = 1 if x else 2
z = x.item()\nlog(z)
log(x.item())
v = x.item()\nif v > 3: raise ValueError\nlog(v)
v = x.item()\nassert v > 0\nreturn x * v
v = x.item()\nassert v > 0\nstore = {}\nstore[v] = 1
v = int(x)\nassert v > 0\nfor i in range(v): log(i)
v = x.item()\nassert v > 0\nif v == 1: log(2)
v = x.item()\nassert v > 0\nlst = []\nlst.append(v)
v = x.item()\nassert v > 0\nf = lambda: v
if not x:\n    log(1)\n    if flag: raise ValueError
try:\n    assert x\nexcept AssertionError:\n    log(1)
try:\n    assert x\nexcept Exception:\n    log(1)
try:\n    assert x\nexcept:\n    log(1)
try:\n    check(x)\nexcept ValueError:\n    log(1)
try:\n    check(x)\nexcept (KeyError, ValueError):\n    log(1)
with suppress(AssertionError):\n    assert x
while x.item() > 3: log(1)
for i in range(int(x)): assert i < 9
x and log(1)
z = x or log(1)
log(x and 1)
assert log(x.item())
assert [].append(x.item()) is None
z = [y.item() for y in [x]]\nlog(z)
[].extend(y.item() for y in [x])
[].extend(map(Tensor.item, [x]))
z = sorted([x], key=lambda y: y.item())
z = sorted([x], key=lambda y: y.item())\nassert z\nlog(z)
assert x.item() > 0 or log(1)
z = f"{x.item()}"\nlog(z)
return helper(x)
z = helper(x)\nlog(z)
total = [1]\ntotal += [x.item()]\nlog(total)
for i in range(2):\n    if x: break
for i in range(2):\n    if not x: continue\n    log(i)
local = log\nassert local(float, x.item())
try:\n    assert x\nfinally:\n    return x
"""


def helper(x: Tensor) -> bool:
    return bool(x)


def helper2(x: Tensor) -> float:
    v = x.item()
    return v


def check(x: Tensor) -> None:
    if x > 3:
        raise ValueError("c")


def log(*values: Any) -> bool:
    return True


def snippets(text: str) -> list[str]:
    return text.strip().split("\n")


def step_of(snippet: str) -> Callable[[Tensor], Any]:
    """A step with those lines in it."""
    body = snippet.replace("\\n", "\n    ")
    space: dict[str, Any] = {**globals(), "flag": True, "suppress": suppress, "math": math}
    exec(compile(f"def step(x):\n    y = x * 2\n    {body}\n    return y\n", "snippet.py", "exec"), space)
    step: Callable[[Tensor], Any] = space["step"]
    return step


@pytest.mark.parametrize("snippet", snippets(ASSERTED))
def test_what_is_only_asserted_refuses_nothing(snippet: str) -> None:
    step = step_of(snippet)
    fast = graph_step(step, backend="tape", verify=4)
    for _ in range(11):
        assert torch.equal(fast(torch.tensor(1.0)), torch.tensor(2.0))
    assert (fast.stats.replayed, fast.stats.verified) == (5, 1)
    assert "asserts a tensor's value, in eager steps and checks only, at " in fast.report()


@pytest.mark.parametrize("snippet", snippets(COMPUTED))
def test_what_is_computed_with_is_refused(snippet: str) -> None:
    fast = graph_step(step_of(snippet), backend="tape")
    with pytest.raises(RefusalError, match="on the host"):
        for _ in range(6):
            fast(torch.tensor(1.0))
