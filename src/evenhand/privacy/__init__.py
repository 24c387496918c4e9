"""Privacy: budgets, accounting, calibration, noise, the ledger and the statement."""
