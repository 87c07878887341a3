"""Values that code reads only to assert them: steps are captured, and eager steps and checks assert."""

from __future__ import annotations

import importlib
import linecache
import math
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Lock
from typing import Any

import pytest
import torch
from torch import Tensor, distributed, nn
from torch.distributions import Normal
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from graphplan import GraphedStep, HostSyncError, RefusalError, graph_step, graphed
from graphplan.feed.call_arguments import CallArguments
from graphplan.feed.signature import flatten
from graphplan.observe.conversions import validates
from graphplan.trace.given_values import GivenValues
from graphplan.trace.host_reads import CodePosition, HostRead
from graphplan.trace.records import Trace
from graphplan.trace.run import trace
from tests.devices import BACKEND, DEVICE
from tests.sharded import one_rank
from tests.twins import by_chance

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
assert torch.equal(x, x + 0) and x.equal(x * 1), "no"
assert x in torch.arange(3, device=x.device)
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
assert all(y.item() > 0 for y in [x, x])
assert max([y.item() for y in [x, x]]) < 3
if any(y.item() > 3 for y in [x]): raise ValueError
assert x.item() in (1, 2)
assert x.item() == 1 if flag else True
if flag and not x: raise ValueError
if x > 1 or flag is None: raise ValueError
try:\n    assert x\nexcept AssertionError as e:\n    raise ValueError("no") from e
v = x.item()\nw = v * 2\nassert w == 2\nv = 3\nz = v
assert {1.0: 2}[x.item()]
try:\n    assert {1.0: 2}[x.item()] == 2\nexcept KeyError:\n    raise ValueError
assert len(str(x.item())) < 9
if not x:\n    if flag: raise ValueError(1)\n    raise KeyError(2)
if not x:\n    for i in range(3): log(i)\n    raise ValueError(1)
assert x or x > 3
assert x and x > 0
assert not x or x > 0
assert x.any() or (~x.bool()).all(), "{} must".format(flag)
assert (x > 3).any() or (x > 0).all(), helper(x)
assert not x.any() or torch.isfinite(x).all(), str(helper2(x))
assert x.any() and (x > 0).any(dim=0), log(1)
assert x.any() or x[None].sum() > 3 or (x + 1).all(), "{}".format(flag)
assert (x > 3).any() and (x < 4).any() or (x > 0).any(), "no"
assert ((x > 3).any() or (x < 4).any()) and (x > 0).any(), "no"
if (x > 3).any() and (x < 4).any(): raise ValueError
if x.any() and (x > 3).any(): raise ValueError(log(1))
if torch.isnan(x).any() and torch.isinf(x).any(): raise ValueError("no")
for i in range(2):\n    assert x.any() or (x > i).all(), "no"\n    log(i)
for i in range(2):\n    if (x > 3).any() and (x > i).all(): raise ValueError
with torch.no_grad():\n    assert x.any() or (x > 3).all(), "no"
if not x.all() or not log(1): raise ValueError
assert x.all() and log(1)
if not (x.all() and log(1)): raise ValueError
v: float = x.item()\nassert v < 3
v = x > 0\nv = v.all().item()\nif not v: raise ValueError
if flag is None: log(1)\nelif not x: raise ValueError
assert (x\n    .max()\n    .item()) < 3
try:\n    with torch.no_grad():\n        assert x\nfinally:\n    log(1)
with nullcontext(), torch.autocast("cpu"), lock:\n    assert x
try:\n    check(x)\nexcept torch.OutOfMemoryError:\n    log(1)
"""
PASSED = r"""
x.item()
v = x.item()\nassert v > 0\nlst = []\nlst.append(v)
v = x.item()\nassert v > 0\nf = lambda: v
assert [].append(x.item()) is None
[].extend(y.item() for y in [x])
[].extend(map(Tensor.item, [x]))
z = sorted([x], key=lambda y: y.item())
z = sorted([x], key=lambda y: y.item())\nassert z\nlog(z)
store = [0]\nstore[0] = x.item()\nassert store[0] > 0
assert isinstance(x.item(), float)
assert log(x.item())
local = log\nassert local(float, x.item())
"""
"""What does nothing with a number but to pass it on, or to assert it."""
BRANCHED = r"""
v = x.item()\nassert v > 0\nif v == 1: log(2)
while x.item() > 3: log(1)
assert x.item() > 0 or log(1)
try:\n    torch._check(x.item() > 0)\nexcept RuntimeError:\n    log(1)
try:\n    assert checked(x) > 0\nexcept ValueError:\n    log(1)
if x > 3: log(1)
if torch.equal(x, y): log(1)
if not x.equal(y): log(1)
z = [1, 2][torch.equal(x, x * 1)]\nlog(z)
try:\n    check(x)\nexcept ValueError:\n    log(1)
try:\n    check(x)\nexcept (KeyError, ValueError):\n    log(1)
assert (x > 3).any() or log(1)
assert (x > 3).any() or log(1) or x.all(), "no"
if x.any() and log(1) and (x > 3).any(): raise ValueError
if x.any() and (x > 3).any(): log(1)
if x.any() and flag: log(1)
z = 1 if x.any() and (x > 0).any() else 2\nlog(z)
if x.any() and {}.setdefault(1, 0): raise ValueError
y = x * (2 if x.any() else 3)
y = [x, 2 if x > 0 else 3][0] + (1 if flag and x.any() else -1)
if 0 <= -x <= len([log(1)]): raise ValueError
if x.all() and not log(1): raise ValueError
if x > 3 or log(1): log(2)
z = [[1], [2]]\nv = z[bool(x > 3)]\nassert v\nv += [3]\nlog(z)
if x: log(1)
if x: log(1)\nelse: log(2)
if not x: return x
if x: return x
z = 1 if x else 2
if not x:\n    log(1)\n    if flag: raise ValueError
try:\n    assert x\nexcept AssertionError:\n    log(1)
try:\n    assert x\nexcept Exception:\n    log(1)
try:\n    assert x\nexcept:\n    log(1)
with suppress(AssertionError):\n    assert x
with suppress(KeyError, Exception):\n    assert x
with suppress(*[AssertionError]):\n    assert x
with torch.no_grad() as s, suppress(AssertionError):\n    assert x
with quiet(AssertionError):\n    assert x
with ExitStack() as stack:\n    stack.enter_context(suppress(AssertionError))\n    assert x
x and log(1)
z = x or log(1)
log(x and 1)
return helper(x)
z = helper(x)\nlog(z)
for i in range(2):\n    if x: break
for i in range(2):\n    if not x: continue\n    log(i)
try:\n    assert x\nfinally:\n    return x
y = x.sum(0 if x else -1)
with quietly():\n    assert x
with Quiet():\n    assert x
with untouched():\n    assert x
with suppress(KeyError):\n    assert x
try:\n    assert x\nexcept KeyError:\n    z = 2
with (suppress(KeyError) if flag else torch.no_grad()):\n    assert x
guard = suppress(AssertionError) if flag else torch.no_grad()\nwith guard:\n    assert x
with [torch.no_grad()][0]:\n    assert x
"""
"""What decides on more than whether the step goes on: replays compare it."""
COMPUTED = r"""
float(x)
z = x.item()\nlog(z)
log(x.item())
v = x.item()\nif v > 3: raise ValueError\nlog(v)
v = x.item()\nassert v > 0\nreturn x ** v
v = x.item()\nassert v > 0\nstore = {}\nstore[v] = 1
v = int(x)\nassert v > 0\nfor i in range(v): log(i)
for i in range(int(x)): assert i < 9
z = [y.item() for y in [x]]\nlog(z)
z = f"{x.item()}"\nlog(z)
total = [1]\ntotal += [x.item()]\nlog(total)
try:\n    assert {1.0: 2}[x.item()]\nexcept KeyError:\n    log(1)
try:\n    assert int(x.item())\nexcept ValueError:\n    log(1)
if (v := x.item()) > 0: log(v)
for i in range(2):\n    if i: log(v)\n    v = x.item()\n    assert v
v = w = x.item()\nassert v\nlog(w)
v = x.item()\nassert v > 0\nv += 1\nlog(v)
v = x.item()\nassert v\nreturn x ** eval("v")
try:\n    assert 1 / x.item() > 0\nexcept ZeroDivisionError:\n    log(1)
try:\n    assert helper2(x) and [1, 2][int(x)].real\nexcept AttributeError:\n    log(1)
"""


def helper(x: Tensor) -> bool:
    return bool(x)


def helper2(x: Tensor) -> float:
    v = x.item()
    del x
    return v


def check(x: Tensor) -> None:
    if x > 3:
        raise ValueError("c")


def checked(x: Tensor) -> float:
    v = x.item()
    if v > 3:
        raise ValueError(v)
    return v


@contextmanager
def quietly() -> Iterator[None]:
    with suppress(AssertionError):
        yield


@contextmanager
def untouched() -> Iterator[None]:
    try:
        yield
    finally:
        log(1)


class Quiet:
    def __enter__(self) -> None: ...

    def __exit__(self, kind: Any, *error: object) -> bool:
        return kind is AssertionError


def log(*values: Any) -> bool:
    return bool(str(values))


def refuses(step: Callable[[Tensor], Any], x: Tensor, match: str = "on the host", kind: Any = HostSyncError) -> None:
    """Fail unless the step is refused on a tensor that does not follow from the batch."""
    fast = graph_step(lambda x: step(by_chance(x)), backend="tape")
    with pytest.raises(kind, match=match):
        for _ in range(6):
            fast(x)


def compares(step: Callable[[Tensor], Any], x: Tensor, **options: Any) -> GraphedStep:
    """Check that replays compare what the step reads of a tensor that does not follow from the batch."""
    fast = graph_step(lambda x: step(by_chance(x)), backend="tape", **options)
    for _ in range(9):
        fast(x)
    assert fast.stats.replayed == 3
    assert fast.plan is not None
    assert fast.plan.branches
    return fast


def snippets(text: str) -> list[str]:
    return text.strip().split("\n")


def step_of(snippet: str) -> Callable[[Tensor], Any]:
    """A step with those lines in it."""
    body = snippet.replace("\\n", "\n    ")
    source, file = f"def step(x):\n    y = x * 2\n    {body}\n    return y\n", f"<{snippet}>"
    linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
    space: dict[str, Any] = {
        **globals(),
        "ExitStack": ExitStack,
        "flag": True,
        "suppress": suppress,
        "nullcontext": nullcontext,
        "quiet": suppress,
        "math": math,
        "lock": Lock(),
    }
    exec(compile(source, file, "exec"), space)
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


def has_few(classes: Tensor) -> None:
    for name, found in (("classes", classes), ("others", -classes)):
        count = len(torch.unique(found, dim=None))
        if count > 4:
            raise ValueError(f"{count} {name}: {torch.unique(found)}")


def is_binary(classes: Tensor) -> None:
    found = (classes > 2).long().unique()
    wrong = torch.any((found != 0) & (found != 1))
    if wrong:
        raise ValueError(f"found {found}")


def has_some(classes: Tensor) -> None:
    assert classes.nonzero().numel() < 99, "too many"
    assert classes[classes > 1].sum() >= 0


@pytest.mark.parametrize("assertion", [has_few, is_binary, has_some])
def test_shapes_that_are_only_asserted(assertion: Callable[[Tensor], None]) -> None:
    """They differ from step to step, and no replay makes such a tensor."""

    def function(x: Tensor) -> Tensor:
        assertion(by_chance(x).long())
        return x * 2

    fast = graph_step(function, backend=BACKEND, verify=4)
    for number in range(11):
        x = torch.arange(6.0, device=DEVICE).clamp(max=number % 4)
        assert torch.equal(fast(x), x * 2)
    assert (fast.stats.captured, fast.stats.replayed, fast.stats.verified) == (1, 5, 1)
    assert "asserts a tensor's value, in eager steps and checks only, at " in fast.report()


def test_a_shape_that_is_used_is_not_asserted() -> None:
    def function(x: Tensor) -> Tensor:
        found = by_chance(x).unique()
        assert len(found) < 9
        return found * 2

    refuses(function, torch.ones(3), match=r"_unique2.* makes a tensor whose shape depends on values")


@pytest.mark.parametrize("snippet", snippets(PASSED))
def test_what_is_passed_on_refuses_nothing(snippet: str) -> None:
    """A number is read where its value is needed."""
    step = step_of(snippet)
    fast = graph_step(lambda x: step(by_chance(x)), backend="tape", verify=4)
    for _ in range(11):
        assert torch.equal(fast(torch.tensor(1.0)), torch.tensor(2.0))
    assert (fast.stats.replayed, fast.stats.verified) == (5, 1)


@pytest.mark.parametrize("snippet", snippets(BRANCHED))
def test_what_is_branched_on_is_compared(snippet: str) -> None:
    compares(step_of(snippet), torch.tensor(1.0))


@pytest.mark.parametrize("snippet", snippets(COMPUTED))
def test_what_is_computed_with_is_refused(snippet: str) -> None:
    refuses(step_of(snippet), torch.tensor(1.0), kind=RefusalError)


class Halved:
    """Halves of a number, down to 0.1: an iterator, or a sequence."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        self.x = self.x / 2
        if self.x < 0.1:
            raise StopIteration
        return self.x


class Multiples:
    def __init__(self, x: Tensor) -> None:
        self.x = x

    def __getitem__(self, number: int) -> Tensor:
        if self.x * number > 3:
            raise IndexError(number)
        return self.x * number

    def __len__(self) -> int:
        if self.x > 3:
            raise TypeError
        return 3


class Skip(Exception):
    pass


@contextmanager
def skipping() -> Iterator[None]:
    try:
        yield
    except Skip:
        log("skipped")


@contextmanager
def translating() -> Iterator[None]:
    try:
        yield
    except KeyError as error:
        raise Skip from error


@skipping()
def skips(x: Tensor, seen: list[Tensor]) -> None:
    if x > 3:
        raise Skip
    seen.append(x * 3)


def translates(x: Tensor, seen: list[Tensor]) -> None:
    with translating():
        if x > 3:
            raise KeyError
    seen.append(x * 3)


def carries(x: Tensor, seen: list[Tensor]) -> None:
    value = complex(x).real
    assert value < 9
    if seen:
        raise Skip(value)


def raises_always(x: Tensor, seen: list[Tensor]) -> None:
    if x > 3:
        raise Skip
    raise KeyError


def raises_at_last(x: Tensor, seen: list[Tensor]) -> None:
    try:
        if x > 3:
            raise KeyError
    finally:
        if x > 3:
            raise Skip


@pytest.mark.parametrize("function", [skips, translates, carries, raises_always, raises_at_last])
def test_exceptions_that_callers_catch(function: Callable[[Tensor, list[Tensor]], None]) -> None:
    def step(x: Tensor) -> Tensor:
        seen = [x * 2]
        try:
            function(x, seen)
        except (Skip, KeyError) as error:
            return x * len(error.args)
        return seen[-1]

    if function is carries:
        refuses(step, torch.tensor(1.0))
    else:
        compares(step, torch.tensor(1.0))


@pytest.mark.parametrize(
    "step", [lambda x: sum(Halved(x), x), lambda x: sum(Multiples(x), x), lambda x: x + list(Multiples(x))[1]]
)
def test_exceptions_that_python_ends(step: Callable[[Tensor], Tensor]) -> None:
    compares(step, torch.tensor(1.0))


def test_generators_give_their_values_away() -> None:
    def values(x: Tensor) -> Iterator[Any]:
        value = x.item()
        yield True
        yield value

    def step(x: Tensor) -> Tensor:
        both = values(x)
        assert next(both)
        return x ** next(both)

    refuses(step, torch.tensor(1.0))


def test_files_that_are_edited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was loaded is not what the file says, until it is loaded again."""
    file = tmp_path / "edited_step.py"
    text = "def step(x):\n    if x > 3: {}\n    return x * 2\n"
    file.write_text(text.format("x = -x"))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    module = importlib.import_module("edited_step")
    file.write_text(text.format("raise ValueError"))
    compares(module.step, torch.tensor(1.0))
    file.write_text("\n" + text.format("raise ValueError(x)"))
    fast = graph_step(importlib.reload(module).step, backend="tape")
    for _ in range(8):
        fast(torch.tensor(1.0))
    assert fast.stats.replayed > 0


def test_source_of_which_python_warns() -> None:
    """Its warnings are not repeated, and it is understood where they are errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = step_of(r"assert x, '\d'")
    fast = graph_step(step, backend="tape")
    for _ in range(8):
        assert torch.equal(fast(torch.tensor(1.0)), torch.tensor(2.0))
    assert fast.stats.replayed > 0


def test_code_without_source_is_refused() -> None:
    space: dict[str, Any] = {}
    exec(compile("def step(x):\n    assert float(x)\n    return x * 2\n", "<nowhere>", "exec"), space)
    refuses(space["step"], torch.tensor(1.0))


def training(assertion: Callable[[Tensor], object], **options: Any) -> tuple[Any, nn.Module]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(x: Tensor) -> Tensor:
        optimizer.zero_grad()
        assertion(x)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss.detach()

    return graph_step(step, owners={"model": model, "optimizer": optimizer}, backend="tape", **options), model


def only_positive(x: Tensor) -> None:
    if not (x > 0).all():
        raise ValueError(f"found {x.min().item():.1f}")


@pytest.mark.parametrize("bad", range(9))
def test_where_assertions_fail(bad: int) -> None:
    """In warm-up, the trace, the capture and checks (replays 1, 2 and 4) as in eager; other replays go on."""
    data = [torch.rand(4, 3) + 0.1 for _ in range(10)]
    data[bad][0, 0] = -1.0
    step, model = training(only_positive, verify="geometric")
    losses = []
    is_asserted = bad != 7
    for number, x in enumerate(data):
        if number == bad and is_asserted:
            with pytest.raises(ValueError, match=r"found -1\.0"):
                step(x)
        else:
            losses.append(step(x))
    found = [value.clone() for value in model.state_dict().values()]
    twin, model = training(only_positive if is_asserted else lambda x: None)
    expected = []
    for x in data:
        with suppress(ValueError):
            expected.append(twin.machine.runner.fn(x))
    assert torch.equal(torch.stack(losses), torch.stack(expected))
    assert all(map(torch.equal, model.state_dict().values(), found))
    assert step.stats.replayed > 0


def logged(x: Tensor) -> bool:
    LOGGED.append(x.shape)
    return True


LOGGED: list[torch.Size] = []


def test_assert_statements_that_pytest_rewrites() -> None:
    def only_asserts(x: Tensor) -> Tensor:
        assert x.sum() > 0 and (x > 0).all(), f"found {x.sum().item()}"
        assert x.min()
        return x * 2

    def logs(x: Tensor) -> Tensor:
        assert x.sum() > 0 or logged(x)
        return x * 2

    fast = graph_step(only_asserts, backend="tape")
    for _ in range(8):
        fast(torch.ones(2))
    assert fast.stats.replayed > 0
    compares(logs, torch.ones(2))


def validated(x: Tensor) -> Tensor:
    return Normal(x.mean(), x.std(), validate_args=True).log_prob(x)


def validated_in_contexts(x: Tensor) -> Tensor:
    with torch.no_grad(), torch.autocast("cpu"), torch.autograd.profiler.record_function("validated"):
        return Normal(x.mean(), x.std(), validate_args=True).log_prob(x)


def validated_and_caught(x: Tensor) -> Tensor:
    """What is computed is asserted, and what is fed is tried, at one place in torch's code."""
    y = Normal(x * 2, x.std(), validate_args=True).log_prob(x.cumsum(0)).exp()
    try:
        Normal(0.0, 1.0, validate_args=True).log_prob(x)
    except ValueError:
        return y * 0
    return y


def recomputed(x: Tensor) -> Tensor:
    def block(y: Tensor) -> Tensor:
        assert y.isfinite().all(), y.max().item()
        return y.exp()

    y = x.clone().requires_grad_()
    checkpoint(block, y, use_reentrant=False, preserve_rng_state=False).sum().backward()
    return y


@pytest.mark.parametrize("assertion", [validated, validated_in_contexts, validated_and_caught, recomputed])
def test_libraries_that_assert(assertion: Callable[[Tensor], Tensor]) -> None:
    """torch's distributions validate what they are given; activation checkpointing asserts a second time."""
    step, _ = training(assertion)
    for _ in range(8):
        step(torch.rand(4, 3) + 0.1)
    assert step.stats.replayed > 0
    assert "asserts a tensor's value" in step.report()


def test_the_plan_says_what_is_asserted() -> None:
    step, _ = training(only_positive)
    for _ in range(8):
        step(torch.rand(4, 3))
    line = r"checks only, at test_assertions\.py:\d+ in only_positive: `if not \(x > 0\)\.all\(\):`"
    assert len(step.plan.host_reads) == 1
    assert re.search(line, str(step.plan)), str(step.plan)


def calls(function: Callable[[Tensor], Any], x: Tensor) -> Any:
    """The function graphed, after calls in inference mode."""
    fast = graphed(function, backend="tape")
    with torch.inference_mode():
        for _ in range(6):
            assert torch.equal(fast(x), function(x))
    return fast


def test_assertions_in_inference_mode() -> None:
    def ask(x: Tensor) -> Tensor:
        assert x.max().item() < 9
        if not x.all():
            raise ValueError(x)
        return x * 2

    assert calls(ask, torch.ones(3)).stats.replayed > 0


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "read", [lambda x: F.one_hot(x), lambda x: x * 2 if complex(x.sum()).real > 1 else x, lambda x: F.one_hot(x, -1)]
)
def test_reads_in_inference_mode_are_refused(mode: Callable[[], Any], read: Callable[[Tensor], Any]) -> None:
    fast = graphed(lambda x: read(by_chance(x)), backend="tape")
    with mode(), pytest.raises(HostSyncError, match=r"on the host|depends on values"):
        for _ in range(6):
            fast(torch.tensor([0, 1, 2]))


CONSTANT = [
    lambda x: F.one_hot(x.argmax(-1), 6),
    lambda x: F.one_hot(x.argmax(-1), num_classes=x.shape[-1]),
    lambda x: torch.nn.functional.one_hot(num_classes=7, input=x.argmax(-1)),  # type: ignore[call-arg]
    lambda x: x.sum(torch.arange(1, x.ndim).tolist()),
    lambda x: x.sum(torch.tensor([1, 2]).tolist()),
    lambda x: x.sum(int(torch.tensor(1))),
    lambda x: x * 2 if torch.tensor([1, 2]).sum() == 3 else x,
    lambda x: x.flatten()[torch.tensor([True, False]).nonzero().item()],
    lambda x: F.ctc_loss(x.log_softmax(-1), torch.ones(2, 3, dtype=torch.long), [5, 5], (3, 3)),  # type: ignore[arg-type]
]


IN_INFERENCE_MODE = [CONSTANT[number] for number in (0, 1, 2, 3, 8)]
"""Where torch shows no mode that it makes a tensor of numbers."""


@pytest.mark.parametrize(
    ("function", "mode"),
    [(function, torch.no_grad) for function in CONSTANT]
    + [(function, torch.inference_mode) for function in IN_INFERENCE_MODE],
)
@pytest.mark.twice
def test_constants_are_read(function: Callable[[Tensor], Tensor], mode: Callable[[], Any]) -> None:
    fast = graphed(function, backend="tape")
    with mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for x in [torch.randn(5, 2, 6) for _ in range(8)]:
            assert torch.equal(fast(x), function(x))
    assert fast.stats.replayed == 4
    assert "asserts" not in fast.report()


def test_constants_that_are_written_to_are_none() -> None:
    def read(x: Tensor) -> Tensor:
        sizes = torch.tensor([1, 2])
        sizes[0] = x.shape[0]
        sizes += x.argmax()
        return x.sum() * sizes.tolist()[0]

    fast = graph_step(read, backend="tape")
    with pytest.raises(HostSyncError, match=r"Tensor\.tolist reads"):
        for _ in range(6):
            fast(torch.ones(3))


def _agreed(x: Tensor) -> Tensor:
    flag = torch.ones(1)
    distributed.all_reduce(flag)
    return flag


@torch.library.custom_op("graphplan_tests::ticket", mutates_args=())
def _ticket() -> Tensor:
    return torch.ones(1)


@pytest.mark.parametrize("make", [_agreed, lambda x: torch.ops.graphplan_tests.ticket()], ids=["collective", "custom"])
def test_what_others_give_is_no_constant(make: Callable[[Tensor], Tensor]) -> None:
    """Another rank's numbers, or those of an operator of the user's own."""
    fast = graph_step(lambda x: x * 2 if complex(make(x)).real > 0 else x, backend="tape")
    with one_rank(), pytest.raises(HostSyncError, match=r"_local_scalar_dense\.default reads a tensor's value"):
        for _ in range(6):
            fast(torch.ones(3))


def test_a_class_out_of_range_is_found_in_replays() -> None:
    fast = graph_step(lambda x: F.one_hot(x, 3), backend="tape", verify="off")
    for _ in range(8):
        fast(torch.tensor([0, 1]))
    with pytest.raises(RuntimeError, match="out of bounds"):
        fast(torch.tensor([0, 3]))


def test_a_number_of_classes_in_a_tensor_is_a_read() -> None:
    """torch takes it as a number. It counted as one that is told, and so did what other steps of the thread read."""
    counts = torch.tensor(3), torch.tensor(4)
    inputs = [torch.randint(3, (6,)) for _ in range(12)]

    def of_batch(x: Tensor) -> Tensor:
        return F.one_hot(x, max(x.max() + 1, *counts)).sum(0)

    fast = graph_step(of_batch, backend="tape", on_failure="eager")
    for x in inputs:
        assert torch.equal(fast(x), of_batch(x))
    assert not validates()

    def branches(x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x - 1

    fast = graph_step(branches, backend="tape", verify="off")
    values = [torch.full((2,), float(sign)) for sign in (1, 1, 1, 1, 1, 1, 1, 1, -1, 1, -1)]
    assert [fast(x).tolist() for x in values] == [branches(x).tolist() for x in values]
    assert fast.stats.replayed


def test_other_functions_stay_what_they_are() -> None:
    """torch's own function is back after traces."""
    before = F.one_hot
    fast = graph_step(lambda x: F.one_hot(x, 3), backend="tape")
    for _ in range(8):
        fast(torch.tensor([0, 1]))
    assert F.one_hot is before


def place_of(reads: Callable[[], object]) -> CodePosition:
    """Where the function reads a tensor, as a trace would find it."""
    record = Trace()
    feed = flatten((), {})
    trace(reads, feed, CallArguments.of(feed).watch(), owners={}, device=torch.device("cpu"), record=record, rates=set)
    return record.host_reads[0].place


def test_a_capture_is_answered_without_the_device() -> None:
    """Each read gets what it got in the traces, in their order, and the last value once they are over."""

    def reads() -> list[float]:
        return [torch.tensor(float(number)).item() for number in range(3)]

    known = [HostRead(place_of(reads), value, asserted=True, waits=True) for value in (7.0, 8.0)]
    with GivenValues(known):
        assert reads() == [7.0, 8.0, 8.0]
        assert torch.tensor(3.0).item() == 3.0


def test_a_refusal_names_the_line_that_reads() -> None:
    """The user's line, and torch's own that it leads to."""
    step = compares(lambda x: x.sum() if 2 in x else x, torch.ones(3))
    assert re.search(r"_tensor\.py:\d+ in ", step.plan.branches[0])
