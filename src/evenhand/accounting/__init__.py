"""Events to epsilon and back, and the frozen Plan. Nothing here imports torch."""
