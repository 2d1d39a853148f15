"""Sparse models: the procedure, the loop under it, the controllers that close gates, what is measured on the way.

Imports config, models, data and what they import.
"""
