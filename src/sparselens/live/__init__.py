"""The studio: a live page over a Run, the local server behind it, and the models it asks.

Imports everything below it: models, circuits, attribution, reporting. Only the command line imports it.
"""
