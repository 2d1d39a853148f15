"""Which edges a task needs: scores, running circuits, curves of explained effect, dense against sparse.

Imports tasks, models and what they import.
"""
