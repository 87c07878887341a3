"""A program: a plan under a policy, with its buffers and one backend's recording."""
