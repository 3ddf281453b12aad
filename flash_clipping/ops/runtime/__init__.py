"""What all operations share: the choice of a backend, launches, tables, costs."""
