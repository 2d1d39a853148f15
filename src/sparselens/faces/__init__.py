"""Faces of features: on which words a transcoder's features are active, what they promote, and a label for each.

Imports config, runs, models, data, tasks, training and transcoders; `store`, `card` and `labels` work without torch.
"""
