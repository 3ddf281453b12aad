"""Private training in trainers that own the loop: Hugging Face's, Lightning's; a dashboard for any.

Each trainer is an optional dependency, imported by its own module only.
"""
