"""Tests of replays that are checked against eager."""
