"""Draws what audits found: a section of a run's report, and a page for figures that stay private."""
