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


def log_event(kind: str, text: str) -> None:
    """Log an event of a step to the logger of one of :data:`NAMES`."""
    logging.getLogger(f"graphplan.{kind}").info("%s", text)


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
