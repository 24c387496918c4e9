"""Comparing methods at the same true epsilon: a grid of runs, worker processes, tables and one report.

``grid`` says what is run, ``pool`` runs it in processes that may die, ``cells`` is one run, ``summary`` reads the run
folders, ``files`` writes tables and pages, ``running`` is the whole of it. Nothing here imports torch at the top.
"""
