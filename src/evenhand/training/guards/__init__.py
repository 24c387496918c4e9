"""Refuse what would void the promise while training: a model that mixes records, hidden state, coupled inputs."""
