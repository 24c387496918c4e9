"""One file per layer type: its gradient of each record."""
