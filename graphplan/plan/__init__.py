"""Build a :class:`~graphplan.plan.plan.Plan` from one or two traces and the owners."""
