"""Train: fit, attach, resume and rebudget, the loop around the private step, and what a run gives back."""
