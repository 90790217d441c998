"""Pure functions of tensors: whitening, factorization, pruning, least squares."""
