"""Sparse features that stand in for MLPs: module, files, losses, procedure. Imports training and what that imports."""
