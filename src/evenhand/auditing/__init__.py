"""Attack a promise: the one door to all audits, and attacks on trained models.

The attack on the mechanism alone, which needs no data, is in ``mechanism/audit``.
"""
