"""Hugging Face decoders, the only package that knows GPT-2 from Llama: parts, gates. Imports config, gating, runs."""
