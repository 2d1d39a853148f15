"""What a run leaves behind: its directory, whole files, checkpoints, locks; several processes that act as one.

Imports nothing else of the package.
"""
