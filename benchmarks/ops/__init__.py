"""Operations beside the floor of what they do; ``bench.py`` is the harness of all."""
