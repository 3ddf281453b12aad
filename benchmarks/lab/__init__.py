"""Developers' own tools."""
