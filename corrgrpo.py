"""CorrGRPO: group-relative advantages normalised by the correlations of the reward components.

Copy this one file into your trainer; it needs torch and nothing else. For a group of G rollouts of one prompt with
component rewards r[i, k] (weights multiplied in) and totals R[i] = sum over k of r[i, k], the advantage is

    A[i] = (R[i] - mean(R)) / sqrt(max(sum over k, l of rho[k, l], 0) + eps)

where rho is the Pearson correlation matrix of the components within the group. GRPO divides the same numerator by the
standard deviation of R, whose square is the sum of all covariances: there the component with the largest scale
decides. Here every live component counts one on the diagonal, whatever its scale.

- With z[k] the centred component divided by its Euclidean norm, sum(rho) = |sum over k of z[k]|^2. So no K x K matrix
  is built, the sum is never negative, and time and memory are O(N K).
- A component that is constant in its group has its row, column and diagonal in rho zero. "Constant" means max - min
  within a few ulps of the dtype the rewards arrived in: the computed variance of 0.1, ..., 0.1 is not exactly zero.
- The numerator keeps the reward scale: doubling every weight doubles CorrGRPO's advantages (GRPO's stay). With one
  component, the advantage is the centred reward. Watch mean |A| when you change weights.
- Components that cancel exactly give sum(rho) = 0 and A = (R - mean) / sqrt(eps), a thousand times the centred reward
  at the default eps. That is the formula; bound A if your optimiser minds (train.py: algo.advantage_clip).

Sources: the CorrGRPO paper (arXiv 2609.36820) for the formula and for the zero rows of constant components; repository
HKUST-KnowComp/CorrGRPO for eps inside the root and its default; the constancy test by range is ours.
"""

from collections.abc import Callable

import torch
from torch import Tensor


def corrgrpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centred total reward over the root of the summed Pearson correlations of the components in the group.

    rewards: [N, K], one row a rollout, one column a component, before weights; integers and bools count as floats.
    groups:  an int G (rows are consecutive groups of G), or [N] integer ids in any order, groups of any size.
    weights: [K], or None for ones.
    Returns [N] advantages in the dtype and on the device of `rewards`, computed in float64. A group of one gets 0.
    Raises ValueError for a non-finite reward (naming rollout and component) and for shapes that don't fit. A missing
    reward is the caller's business: leave that rollout out before calling.
    """
    x, group_sum = _centre(rewards, groups, weights)
    z = _unit(x, group_sum).sum(-1)                                  # sum over k of z[k]
    return _like(rewards, x.sum(-1) / (group_sum(z.square()) + eps).sqrt())


def grpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centred total reward over the standard deviation of the total in the group: Shao et al. 2024 (DeepSeekMath).

    The variance has n - 1, as in TRL and verl; eps stands inside the root. Arguments and errors as in `corrgrpo`.
    """
    x, group_sum = _centre(rewards, groups, weights)
    total = x.sum(-1)
    return _like(rewards, total / (_variance(total, group_sum) + eps).sqrt())


def gdpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Each component over its standard deviation in the group; their weighted sum normalised over the batch: Liu et al.
    2026 (GDPO). Weights multiply after the first normalisation, which would undo them before.

    Both variances have n - 1, eps stands inside both roots. Arguments and errors as in `corrgrpo`.
    """
    x, group_sum = _centre(rewards, groups, None)
    x = x / (_variance(x, group_sum) + eps).sqrt()
    total = (x if weights is None else x * _checked(weights, rewards)).sum(-1).reshape(-1)
    total = total - total.mean()
    return _like(rewards, total / (total.square().sum() / max(len(total) - 1, 1) + eps).sqrt())


def dr_grpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centred total reward and no division: Liu et al. 2025 (Dr. GRPO). `eps` has no effect."""
    return _like(rewards, _centre(rewards, groups, weights)[0].sum(-1))


def rloo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Total reward minus the mean total of the rest of the group: Ahmadian et al. 2024 (RLOO). `eps` has no effect."""
    x, group_sum = _centre(rewards, groups, weights)
    size = group_sum(torch.ones_like(x[..., 0]))
    return _like(rewards, x.sum(-1) * size / (size - 1).clamp(min=1))


ESTIMATORS = {"corrgrpo": corrgrpo, "grpo": grpo, "gdpo": gdpo, "dr_grpo": dr_grpo, "rloo": rloo}


def reward_correlation(rewards: Tensor, groups: int | Tensor) -> Tensor:
    """[B, K, K]: the Pearson matrix of each group, in order of the group's first appearance; zeros where constant."""
    x, group_sum = _centre(rewards, groups, None)
    z = _unit(x, group_sum).reshape(rewards.shape)
    index, count = _group_index(groups, z)
    rho = z.new_zeros(count, z.shape[1], z.shape[1])
    for k in range(z.shape[1]):                                      # a row at a time: never [N, K, K] in memory
        rho[:, k] = z.new_zeros(count, z.shape[1]).index_add_(0, index, z[:, k : k + 1] * z)
    return rho.to(rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def denominators(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """For logs: what each rollout's centred reward is divided by, eps left out, and whether its group is live.

    {"grpo": [N] standard deviation of the total, "corrgrpo": [N] root of the summed correlations, "live": [N] bool,
    does any weighted component vary in the group}. Arguments and errors as in `corrgrpo`.
    """
    x, group_sum = _centre(rewards, groups, weights)
    total, z = x.sum(-1), _unit(x, group_sum).sum(-1)
    out = {
        "grpo": _variance(total, group_sum).sqrt(),
        "corrgrpo": group_sum(z.square()).sqrt(),
        "live": group_sum((x != 0).any(-1).double()) > 0,
    }
    return {name: v.expand_as(total).reshape(-1) for name, v in out.items()}


def _centre(rewards: Tensor, groups: int | Tensor, weights: Tensor | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """(x, group_sum). x: weighted rewards minus their group's mean, float64, exactly 0 where constant in the group;
    [B, G, K] for an int G, else [N, K]. group_sum(v): sums v, shaped like x or x[..., 0], over each group, and keeps a
    shape that broadcasts with v."""
    if not isinstance(rewards, Tensor) or rewards.dim() != 2 or not rewards.shape[1]:
        got = list(rewards.shape) if isinstance(rewards, Tensor) else type(rewards).__name__
        raise ValueError(f"rewards must be a tensor [rollouts, components], got {got}")
    x = rewards.detach().double()
    if not torch.isfinite(x).all():                                  # the one host synchronisation
        row, column = (~torch.isfinite(x)).nonzero()[0].tolist()
        raise ValueError(
            f"the reward of rollout {row}, component {column} is {x[row, column].item()}: "
            "leave rollouts without a score out before computing advantages"
        )
    if weights is not None:
        x = x * _checked(weights, rewards)
    index, count = _group_index(groups, x)
    if isinstance(groups, Tensor):

        def group_sum(v: Tensor) -> Tensor:
            return v.new_zeros(count, *v.shape[1:]).index_add_(0, index, v)[index]

        rows = index[:, None].expand_as(x)
        low, high = (x.new_zeros(count, x.shape[1]).scatter_reduce(0, rows, x, how, include_self=False)[index]
                     for how in ("amin", "amax"))
    else:

        def group_sum(v: Tensor) -> Tensor:
            return v.sum(1, keepdim=True)

        x = x.view(count, groups, x.shape[1])
        low, high = x.amin(1, keepdim=True), x.amax(1, keepdim=True)
    ulps = 2 * torch.finfo(rewards.dtype).eps if rewards.is_floating_point() else 0.0
    constant = high - low <= ulps * torch.maximum(high.abs(), low.abs())
    mean = group_sum(x) / group_sum(torch.ones_like(x[..., :1]))
    return (x - mean).masked_fill(constant, 0.0), group_sum


def _group_index(groups: int | Tensor, x: Tensor) -> tuple[Tensor, int]:
    """Each row's group as 0 .. B - 1 in order of first appearance, and B."""
    n = len(x)
    if isinstance(groups, Tensor):
        if groups.shape != (n,) or groups.is_floating_point() or groups.is_complex():
            raise ValueError(f"groups must be an int or [{n}] integer ids, got {groups.dtype} {list(groups.shape)}")
        ids, index = torch.unique(groups.to(x.device), return_inverse=True)
        first = torch.full_like(ids, n, dtype=torch.long).scatter_reduce(
            0, index, torch.arange(n, device=x.device), "amin")
        return first.argsort().argsort()[index], len(ids)
    if groups < 1 or n % groups:
        raise ValueError(f"{n} rollouts don't divide into groups of {groups}; pass group ids for unequal groups")
    return torch.arange(n, device=x.device) // groups, n // groups


def _unit(x: Tensor, group_sum: Callable[[Tensor], Tensor]) -> Tensor:
    """Centred components over their Euclidean norm in the group; 0 where constant."""
    norm = group_sum(x.square()).sqrt()
    return x / norm.masked_fill(norm == 0, 1.0)


def _variance(x: Tensor, group_sum: Callable[[Tensor], Tensor]) -> Tensor:
    return group_sum(x.square()) / (group_sum(torch.ones_like(x)) - 1).clamp(min=1)


def _checked(weights: Tensor, rewards: Tensor) -> Tensor:
    weights = torch.as_tensor(weights, dtype=torch.float64, device=rewards.device)
    if weights.shape != rewards.shape[1:] or not torch.isfinite(weights).all():
        raise ValueError(f"weights must be {rewards.shape[1]} finite numbers, one a component, got {weights.tolist()}")
    return weights


def _like(rewards: Tensor, advantages: Tensor) -> Tensor:
    dtype = rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype()
    return advantages.reshape(-1).to(dtype)
