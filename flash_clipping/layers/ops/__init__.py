"""Operations that the layers here are made of, laid out as those in :mod:`flash_clipping.ops`."""
