"""A live page over a Run: type a prompt, close a gate, see the answer change; a local server and the models behind it.

Imports everything below it: models, circuits, attribution, reporting. Only the command line imports it.
"""
