"""The audit of a run's mechanism as its folder has it: read, checked against the plan, and put into words."""
