"""Pruned weights entry by entry and column by column, in float64: slow, explicit, independent of the library."""

import torch


def least_squares(inputs, weight, support):
    """Return argmin ‖X(W - W̃)‖² over W̃ that is zero outside the support: one `lstsq` per column."""
    best = torch.zeros_like(weight)
    for j in range(weight.shape[1]):
        kept = support[:, j].nonzero()[:, 0]
        if len(kept):
            best[kept, j] = torch.linalg.lstsq(inputs[:, kept], inputs @ weight[:, j], driver="gelsd").solution
    return best


def output_error(inputs, weight, approximation):
    """‖X(W - W̃)‖²."""
    return float(torch.linalg.norm(inputs @ (weight - approximation)) ** 2)


def magnitude(weight, count):
    """Choose the entries of largest magnitude, one at a time."""
    places = [(i, j) for i in range(weight.shape[0]) for j in range(weight.shape[1])]
    return _mask(weight, sorted(places, key=lambda place: -abs(float(weight[place])))[:count])


def wanda(inputs, weight, count):
    """Choose by |w|·‖x‖ within each output; the first outputs keep one more if the count is not divisible."""
    d_in, d_out = weight.shape
    kept = []
    for j in range(d_out):
        scores = {i: abs(float(weight[i, j])) * float(torch.linalg.norm(inputs[:, i])) for i in range(d_in)}
        share = count // d_out + (1 if j < count % d_out else 0)
        kept += [(i, j) for i in sorted(scores, key=lambda i: -scores[i])[:share]]
    return _mask(weight, kept)


def sparsegpt(inputs, weight, count, block):
    """Prune input by input, giving all later entries of an output their least-squares values after each."""
    d_in, d_out = weight.shape
    pruned, target = weight.clone(), inputs @ weight
    kept = []
    for start in range(0, d_in, block):
        stop = min(start + block, d_in)
        scores = {}
        for i in range(start, stop):
            alone = float(torch.linalg.inv(inputs[:, i:].T @ inputs[:, i:])[0, 0])
            scores |= {(i, j): float(pruned[i, j]) ** 2 / alone for j in range(d_out)}
        share = round(count * stop / d_in) - round(count * start / d_in)
        chosen = sorted(scores, key=lambda place: -scores[place])[:share]
        kept += chosen
        for i in range(start, stop):
            for j in range(d_out):
                if (i, j) not in chosen:
                    pruned[i, j] = 0
            rest = target - inputs[:, : i + 1] @ pruned[: i + 1]
            if i + 1 < d_in:
                pruned[i + 1 :] = torch.linalg.lstsq(inputs[:, i + 1 :], rest, driver="gelsd").solution
    return pruned, _mask(weight, kept)


def _mask(weight, places):
    mask = torch.zeros(weight.shape, dtype=torch.bool)
    for place in places:
        mask[place] = True
    return mask
