"""pass@k: how likely at least one of k samples passes, estimated from n samples without bias."""

from __future__ import annotations

from math import comb


def pass_at_k(num_samples: int, num_passed: int, k: int) -> float:
    """1 - C(n - c, k) / C(n, k): of all ways to draw k of the n samples, the share with one of the c that
    pass.

    Chen et al. 2021, "Evaluating Large Language Models Trained on Code", equation 1 (arXiv:2107.03374). The
    plain 1 - (1 - c/n)^k is too low. Raises ValueError where k samples cannot be drawn.
    """
    if not (1 <= k <= num_samples and 0 <= num_passed <= num_samples):
        raise ValueError(f"cannot draw {k} of {num_samples} samples, {num_passed} of which pass")
    return 1.0 - comb(num_samples - num_passed, k) / comb(num_samples, k)
