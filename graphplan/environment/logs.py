"""Loggers of Python's ``logging``, one for each kind of event, such as ``graphplan.captures``."""

from __future__ import annotations

import logging


def log_event(kind: str, text: str) -> None:
    """Log an event of a step to the logger of its kind."""
    logging.getLogger(f"graphplan.{kind}").info("%s", text)


def log_eager(text: str) -> None:
    """Log why a call was eager. There may be one in every step."""
    logging.getLogger("graphplan.eager").debug("%s", text)
