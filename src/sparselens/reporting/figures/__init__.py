"""The figures for print, drawn from the same rows as the page. No torch.

Imports what reporting may.
"""
