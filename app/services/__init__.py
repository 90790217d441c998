"""Operations of the web side, one function each; they return values and raise errors, without knowing HTTP."""
