"""Replays checked against eager: when, with which copies, and what counts as a difference."""
