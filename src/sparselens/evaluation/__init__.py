"""Models side by side: loss and density, benchmarks, what they say, attention on a few prompts, export, kernel times.

Imports everything above it: circuits, attribution, training, tasks, models.
"""
