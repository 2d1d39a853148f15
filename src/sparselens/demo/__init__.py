"""The addition model: a small transformer that adds two-digit numbers, from nothing to figures 1 to 4.

Uses the package as any user would; nothing but the command line imports it.
"""

from . import task as task  # registers
