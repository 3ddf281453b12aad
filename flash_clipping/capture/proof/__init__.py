"""Proof that what is clipped is each sample's own gradient (:mod:`.prove` is where to begin)."""
