"""From a Run to a page somebody looks at: what the Run lacks is computed, then written once or served live.

Imports evaluation and reporting.
"""
