"""Sparse features that stand in for MLPs: the module, its files, its losses, its evaluation, its procedure.

Imports training, models, data and what they import.
"""
