"""Text: documents, tokens, packed batches; other data by registration.

Imports runs and models.
"""
