"""One test for each way in which a captured step can go wrong; docs/failure-modes.md has the table."""
