"""Loggers of Python's ``logging`` under ``graphplan``, one for each kind of event, and ``GRAPHPLAN_LOGS``.

``GRAPHPLAN_LOGS=recaptures,+guards,-eager`` writes to stderr, as ``TORCH_LOGS`` does: a name alone asks for messages
from ``INFO`` on, with ``+`` from ``DEBUG`` on, with ``-`` for errors alone; ``all`` stands for every name.
"""

from __future__ import annotations

import logging
import os

from graphplan.errors import OptionError

VARIABLE = "GRAPHPLAN_LOGS"
NAMES = ("captures", "checks", "eager", "guards", "recaptures", "traces")
_LEVELS = {"+": logging.DEBUG, "-": logging.ERROR}
_KINDS = {
    "traced anew": "traces", "recapture": "recaptures", "another program": "guards", "followed": "guards",
    "invalidated": "guards", "evicted": "captures", "dropped": "captures", "not checked": "checks",
}  # fmt: skip
"""The logger of an event, by how its text begins; of any other event, that of captures."""


def log_event(text: str) -> None:
    """Log an event of a step."""
    name = next((name for start, name in _KINDS.items() if text.startswith(start)), "captures")
    logging.getLogger(f"graphplan.{name}").info("%s", text)


def log_eager(text: str) -> None:
    """Log why a call was eager. There may be one in every step."""
    logging.getLogger("graphplan.eager").debug("%s", text)


def configure(wanted: str | None) -> None:
    """Have loggers write to stderr, as ``wanted`` says; nothing if that is None or empty.

    Raises:
        OptionError: for a name that no logger has.
    """
    for word in filter(None, map(str.strip, (wanted or "").split(","))):
        name = word.lstrip("+-")
        if name not in (*NAMES, "all"):
            raise OptionError(f"{VARIABLE} names {name!r}; choose from: {', '.join(NAMES)}, all")
        for each in NAMES if name == "all" else (name,):
            logger = logging.getLogger(f"graphplan.{each}")
            logger.setLevel(_LEVELS.get(word[0], logging.INFO))
            if not logger.handlers:
                handler = logging.StreamHandler()
                handler.setFormatter(logging.Formatter("[%(name)s] %(message)s"))
                logger.addHandler(handler)


configure(os.environ.get(VARIABLE))
