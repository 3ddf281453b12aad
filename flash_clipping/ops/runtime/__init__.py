"""Shared by all operations: the choice of a backend, launches, tables, costs."""
