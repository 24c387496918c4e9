"""Compare methods at the same true epsilon: a grid of runs, worker processes, tables and one report.

``sweep`` says what is run, ``executors`` runs it in processes that may die, ``run_cell`` is one run, ``summary`` reads
the run folders, ``tables`` writes tables and pages, ``compare`` is the whole. Nothing here imports torch at the top.
"""
