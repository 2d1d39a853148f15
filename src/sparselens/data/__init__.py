"""Text: documents, tokens, packed batches. Imports runs."""
