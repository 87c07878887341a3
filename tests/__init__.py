"""Tests of graphplan; eager is the oracle."""
