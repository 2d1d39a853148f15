"""Models side by side: loss and density, benchmarks, what they say, attention on a few prompts, parity with transformers, kernel times.

Imports everything above it: circuits, attribution, training, tasks, models.
"""
