"""Hugging Face decoders: what their parts are called, gates inside them, one forward pass taken apart.

The only package that knows GPT-2 from Llama. Imports config, gating and runs.
"""
