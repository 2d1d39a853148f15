"""From a Run to what others see: its page, written once or served live; its model, exported or published.

Imports evaluation and reporting.
"""
