"""Attacks on a plan's own step: the audit that needs no data."""
