"""Samplers and loaders: which rows a step draws."""
