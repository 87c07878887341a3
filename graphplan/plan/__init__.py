"""From one trace or two and the owners to a :class:`~graphplan.plan.plan.Plan`."""
