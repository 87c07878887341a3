"""What a graphed function is called with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphplan.errors import FeedError
from graphplan.feed.signature import Feed, flatten, is_dense


def dense_feed(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Feed | None:
    """A call of dense tensors and literals, flattened; None if there is something else among its arguments."""
    try:
        feed = flatten(args, kwargs)
    except FeedError:
        return None
    return feed if all(is_dense(leaf) for _, leaf in feed.tensors()) else None
