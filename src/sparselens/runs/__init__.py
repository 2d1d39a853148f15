"""What a run leaves behind: folder, whole files, checkpoints, locks; processes that act as one. Imports none."""
