"""Lightning's loop over training batches with graphed steps in it."""
