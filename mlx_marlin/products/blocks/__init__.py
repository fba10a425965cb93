"""Operations of a decoder block that are no products."""
