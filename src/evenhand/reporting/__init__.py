"""The report: accuracy per group with intervals, charts drawn as plain SVG, and one self-contained HTML page.

``frames`` measures, ``svg`` draws, ``html`` writes the page. Nothing here imports torch.
"""
