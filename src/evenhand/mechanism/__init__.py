"""Turn a promise into a plan, and a batch into a private gradient: sampling, weights and noise."""
