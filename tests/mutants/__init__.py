"""Do the tests notice a wrong library? See ``__main__.py``."""
