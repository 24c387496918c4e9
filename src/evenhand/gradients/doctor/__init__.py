"""Tell whether a model can be trained privately, and what to change if not."""
