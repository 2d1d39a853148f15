"""Sparse models: procedure, loop, controllers that close gates, measures. Imports config, models, data and theirs."""
