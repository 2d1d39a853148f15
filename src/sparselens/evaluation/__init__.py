"""Models side by side: loss and density, benchmarks, what they say, attention, parity with transformers, kernel times.

Imports everything above it: circuits, attribution, training, tasks, models.
"""
