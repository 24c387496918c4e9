"""Measures groups, draws charts and writes pages and cards: pure functions from data to text.

``group_metrics`` and ``intervals`` measure, ``charts`` and ``comparison_charts`` draw on ``svg``, ``run_page``,
``comparison_page`` and ``model_card`` write; ``page`` builds every HTML page from ``templates/``. A new section of a
report is a function that returns a ``page.Section``, listed in ``_SECTIONS`` of its page. Nothing here imports torch,
and jinja2 is imported only when a page is built.
"""
