"""The same on the device as on the host, where small tensors are handled together only in tests."""

from tests.test_copying import *  # noqa: F403
