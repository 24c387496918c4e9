"""Keep what a run leaves on disk: its folder, ledger, checkpoints, statement, and how to verify them without torch."""
