"""Check replays against eager steps: the schedule, the copies, and the comparison."""
