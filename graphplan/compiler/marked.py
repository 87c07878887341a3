"""Attributes of fed tensors, which a feed's key has or nobody has."""

from __future__ import annotations

from graphplan.errors import FeedError
from graphplan.marks import marks_of
from graphplan.signature import Feed, is_literal
from graphplan.tracer import Trace


def check_marks(feed: Feed, first: Trace, second: Trace) -> None:
    """Refuse a step that reads an attribute of a fed tensor which a feed's key cannot hold, or a copy of the tensor not
    have.

    Raises:
        FeedError: naming the attribute.
    """
    for index, leaf in feed.tensors():
        for name, value in marks_of(leaf).items():
            if not any(trace.reads.reads_mark(name) for trace in (first, second)):
                continue
            path = f"{feed.names()[index]}.{name}"
            if not is_literal(value):
                raise FeedError(
                    f"the step's code reads {path}, a {type(value).__name__} that hangs on what is fed, and nobody "
                    "would see that it changed; expected a number, a string or the like there. Feed it as an argument "
                    "of its own"
                )
            if leaf.requires_grad:
                raise FeedError(
                    f"the step's code reads {path}, which hangs on a tensor that asks for gradients: the copy that a "
                    "replay works on does not have it. Feed it as an argument of its own"
                )
