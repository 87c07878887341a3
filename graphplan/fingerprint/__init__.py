"""The Python values that every program bakes in."""

from graphplan.fingerprint.fingerprint import Fingerprint as Fingerprint
