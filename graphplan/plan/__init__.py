"""From two traces and the owners to a :class:`~graphplan.plan.plan.Plan`."""
