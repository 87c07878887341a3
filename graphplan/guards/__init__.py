"""Is what a program depends on still where it was, and as it was?"""
