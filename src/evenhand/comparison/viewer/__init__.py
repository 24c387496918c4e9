"""Shows finished runs beside each other: on a local server for one person, or as one file to hand on.

``released`` reads what may be shared of a run folder, ``planner`` answers what other settings would cost, ``page`` lays
both out, ``server`` serves them on this machine only. Nothing here imports torch or reads ``private/``.
"""
