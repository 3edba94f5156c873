"""CorrGRPO: group-relative advantages normalised by the correlations of the reward components.

Copy this one file into your trainer; it needs Python 3.10, torch 2.4 and nothing else. For a group of G rollouts of one
prompt with component rewards r[i, k] (weights multiplied in) and totals R[i] = sum over k of r[i, k], the advantage is

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
- The estimators refuse a missing reward (NaN); `skip_missing` leaves such rollouts out.

`python corrgrpo.py` shows the paper's Figure 2; `python corrgrpo.py FILE.jsonl ...` says whether one reward drowns the rest.

Sources: the paper (arXiv 2609.36820) for the formula and the zero rows; the repository HKUST-KnowComp/CorrGRPO for eps
inside the root and its default; the constancy test by range is ours.
"""

import argparse
import fileinput
import json
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def corrgrpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centred total reward over the root of the summed Pearson correlations of the components in the group.

    rewards: [N, K], one row a rollout, one column a component, before weights; integers and bools count as floats.
    groups:  an int G (rows are consecutive groups of G), or [N] integer ids in any order, groups of any size.
    weights: [K], or None for ones.
    Returns [N] advantages in the dtype and on the device of `rewards`, computed in float64. A group of one gets 0.
    Raises ValueError for a non-finite reward (naming rollout and component) and for shapes that don't fit. Where
    rewards may be missing, call it through `skip_missing`.
    """
    x, group = _centre(rewards, groups, weights)
    total = x.sum(0)
    z = _unit_(x, group).sum(0)                                      # sum over k of z[k]
    return _like(rewards, total / (group.sum(z.square()) + eps).sqrt())


def grpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centred total reward over the standard deviation of the total in the group: Shao et al. 2024 (DeepSeekMath).

    The variance has n - 1, as in TRL and verl; eps stands inside the root. Arguments and errors as in `corrgrpo`.
    """
    x, group = _centre(rewards, groups, weights)
    total = x.sum(0)
    return _like(rewards, total / (_variance(total, group) + eps).sqrt())


def gdpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Each component over its standard deviation in the group; their weighted sum normalised over the batch: Liu et al.
    2026 (GDPO). Weights multiply after the first normalisation, which would undo them before.

    Both variances have n - 1, eps stands inside both roots. Arguments and errors as in `corrgrpo`.
    """
    x, group = _centre(rewards, groups, None)
    total = (x / (_variance(x, group) + eps).sqrt() * _column(weights, rewards)).sum(0)
    total = total - total.mean()
    return _like(rewards, total / (total.square().sum() / max(total.numel() - 1, 1) + eps).sqrt())


def dr_grpo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Centred total reward and no division: Liu et al. 2025 (Dr. GRPO). `eps` has no effect."""
    return _like(rewards, _centre(rewards, groups, weights)[0].sum(0))


def rloo(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None, eps: float = 1e-6) -> Tensor:
    """Total reward minus the mean total of the rest of the group: Ahmadian et al. 2024 (RLOO). `eps` has no effect."""
    x, group = _centre(rewards, groups, weights)
    return _like(rewards, x.sum(0) * (group.size / group.others))


ESTIMATORS = {"corrgrpo": corrgrpo, "grpo": grpo, "gdpo": gdpo, "dr_grpo": dr_grpo, "rloo": rloo}


def skip_missing(estimator: Callable[..., Tensor], rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None,
                 eps: float = 1e-6) -> Tensor:
    """`estimator(rewards, groups, weights, eps)` where NaN in `rewards` says "no score".

    A component that nobody in the group has a score for counts for nothing there (a reward that is not meant for this
    prompt). A rollout without a score that others of its group have is left out, as if it had not been sampled: it gets
    0 and moves nobody else's advantage. A component of weight 0 is never missed. Infinite rewards raise ValueError.
    """
    if not rewards.isnan().any():
        return estimator(rewards, groups, weights, eps)
    keep, ids, filled = _scored(rewards, groups, weights)
    some = estimator(filled[keep], ids[keep], weights, eps)
    return some.new_zeros(len(keep)).masked_scatter(keep, some)


def reward_correlation(rewards: Tensor, groups: int | Tensor) -> Tensor:
    """[B, K, K]: the Pearson matrix of each group, in order of the group's first appearance; zeros where constant."""
    x, group = _centre(rewards, groups, None)
    z = _unit_(x, group)
    rho = torch.stack([group.each(group.sum(row * z)) for row in z])  # a row at a time: never [N, K, K] in memory
    return _like(rewards, rho.permute(2, 0, 1)).view(-1, len(z), len(z))


def denominators(rewards: Tensor, groups: int | Tensor, weights: Tensor | None = None) -> dict[str, Tensor]:
    """For logs: what each rollout's centred reward is divided by, eps left out, and whether its group is live.

    {"grpo": [N] standard deviation of the total, "corrgrpo": [N] root of the summed correlations, "live": [N] bool,
    does any weighted component vary in the group}. Arguments and errors as in `corrgrpo`.
    """
    x, group = _centre(rewards, groups, weights)
    total, live = x.sum(0), group.sum((x != 0).any(0).double()) > 0
    out = {"grpo": _variance(total, group).sqrt(), "corrgrpo": group.norm(_unit_(x, group).sum(0)), "live": live}
    return {name: v.expand_as(total).reshape(-1) for name, v in out.items()}


class _Groups:
    """Which rollouts belong together. Rewards are laid out as [K, b, g]: b groups of g for an int; for ids, b = 1, g = N.
    `sum`, `norm` and `extremes` reduce the last dimension group by group, to what broadcasts against such a tensor."""

    def __init__(self, groups: int | Tensor, n: int, device: torch.device):
        if not isinstance(groups, Tensor) and hasattr(groups, "__index__"):
            if groups < 1 or n % groups:
                raise ValueError(f"{n} rollouts don't divide into groups of {groups}; pass group ids for unequal groups")
            self.index, self.shape, self.size, self.others = None, (n // groups, groups), groups, max(groups - 1, 1)
            return
        if not isinstance(groups, Tensor) or groups.shape != (n,) or groups.is_floating_point() or groups.is_complex():
            raise ValueError(f"groups must be an int or a tensor of [{n}] integer ids, got {_kind(groups)}")
        ids, order = groups.to(device).sort(stable=True)
        start = (torch.arange(n, device=device) * (ids != ids.roll(1))).cummax(0).values
        self.index = torch.empty_like(order).scatter_(0, order, order[start])        # the first rollout of its group
        self.shape, self.size = (1, n), self.sum(torch.ones(1, n, dtype=torch.float64, device=device))
        self.others = (self.size - 1).clamp(min=1)

    def split(self, v: Tensor) -> Tensor:
        return v.t().view(v.shape[1], *self.shape)

    def sum(self, v: Tensor) -> Tensor:
        if self.index is None:
            return v.sum(-1, keepdim=True)
        index = self.index.expand(v.shape)
        return torch.zeros_like(v).scatter_add_(-1, index, v).gather(-1, index)

    def mean(self, v: Tensor) -> Tensor:
        return v.mean(-1, keepdim=True) if self.index is None else self.sum(v) / self.size

    def norm(self, v: Tensor) -> Tensor:
        return torch.linalg.vector_norm(v, dim=-1, keepdim=True) if self.index is None else self.sum(v.square()).sqrt()

    def extremes(self, v: Tensor) -> list[Tensor]:
        if self.index is None:                                       # many times faster down columns than along rows
            v = v.permute(2, 1, 0).contiguous()
            return [m.permute(2, 1, 0) for m in (v.amin(0, keepdim=True), v.amax(0, keepdim=True))]
        index, start = self.index.expand(v.shape), torch.zeros_like(v)
        return [start.scatter_reduce(-1, index, v, how, include_self=False).gather(-1, index) for how in ("amin", "amax")]

    def each(self, v: Tensor) -> Tensor:
        """[..., B]: what `sum` returned, once a group, in order of first appearance."""
        return v.squeeze(-1) if self.index is None else v.squeeze(-2)[..., self.index.unique()]


def _centre(rewards: Tensor, groups: int | Tensor, weights: Tensor | None) -> tuple[Tensor, _Groups]:
    """Weighted rewards minus their mean in the group, exactly 0 where constant: float64, laid out as `_Groups` says."""
    if not isinstance(rewards, Tensor) or rewards.dim() != 2 or not rewards.shape[1] or rewards.is_complex():
        raise ValueError(f"rewards must be a real tensor [rollouts, components], got {_kind(rewards)}")
    raw = rewards.detach() if rewards.is_floating_point() else rewards.double()
    raw = raw.cpu() if raw.is_mps else raw                           # which has no float64
    group, weights = _Groups(groups, len(raw), raw.device), _column(weights, raw)
    v = group.split(raw)
    low, high = group.extremes(v)
    span = high - low
    if not math.isfinite((span.double() * weights).sum()):           # the one host synchronisation
        bad = ~torch.isfinite(raw)
        for (row, column), value in zip(bad.nonzero().tolist(), raw[bad].tolist()):
            raise ValueError(f"the reward of rollout {row}, component {column} is {value}: leave rollouts without a score "
                             "out before computing advantages (skip_missing does)")
        if not torch.isfinite(torch.as_tensor(weights)).all():
            raise ValueError(f"weights must be finite numbers, got {weights.flatten().tolist()}")
    ulps = 2 * torch.finfo(rewards.dtype).eps if rewards.is_floating_point() else 0.0
    live = span > ulps * high.abs()                                  # where that matters, low is as large
    x = v.to(torch.float64, memory_format=torch.contiguous_format, copy=True)
    x -= group.mean(x)
    x *= live.double() * weights
    return x, group


def _column(weights: Tensor | None, rewards: Tensor) -> float | Tensor:
    """The weights as [K, 1, 1], to multiply a tensor laid out as `_Groups` says."""
    if weights is None:
        return 1.0
    weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu" if rewards.is_mps else rewards.device)
    if weights.shape != rewards.shape[1:]:
        raise ValueError(f"weights must be {rewards.shape[1]} finite numbers, one a component, got {weights.tolist()}")
    return weights.view(-1, 1, 1)


def _unit_(x: Tensor, group: _Groups) -> Tensor:
    """Centred components over their Euclidean norm in the group, 0 where constant. Overwrites x: half the memory."""
    return x.div_(group.norm(x).clamp_(min=1e-300))


def _variance(x: Tensor, group: _Groups) -> Tensor:
    return group.sum(x.square()) / group.others


def _kind(v: object) -> str:
    return f"{v.dtype} {list(v.shape)}" if isinstance(v, Tensor) else type(v).__name__


def _like(rewards: Tensor, v: Tensor) -> Tensor:
    return v.reshape(-1).to(rewards.device, rewards.dtype if rewards.is_floating_point() else torch.get_default_dtype())


def _scored(rewards: Tensor, groups: int | Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """keep [N]: has the rollout every score that its group has? ids [N]: its group. And the rewards, 0 for NaN."""
    group, missing = _Groups(groups, len(rewards), rewards.device), rewards.isnan()
    asked = missing if weights is None else missing & (torch.as_tensor(weights, device=rewards.device) != 0)
    asked = group.split(asked)
    keep = ~(asked & (group.sum((~asked).float()) > 0)).any(0).reshape(-1)
    ids = torch.arange(len(keep), device=keep.device) // group.size if group.index is None else group.index
    return keep, ids, rewards.masked_fill(missing, 0.0)


def diagnose(rewards: Tensor, groups: int | Tensor, names: Sequence[str] | None = None, weights: Tensor | None = None) -> None:
    """Prints whether one component drowns the others: which one decides GRPO's normalisation, how the components
    correlate, how many groups are dead or cancel, and how large the advantages are under each estimator.

    Arguments as in `corrgrpo`, names: [K] strings. NaN is a missing reward and treated as in `skip_missing`.
    """
    rewards, k = rewards.detach().cpu().double(), rewards.shape[1]
    w = torch.ones(k).double() if weights is None else torch.as_tensor(weights).cpu().double()
    keep, ids, filled = _scored(rewards, groups.cpu() if isinstance(groups, Tensor) else groups, w)
    keep &= ~rewards.isnan().all(1)
    if not keep.any():
        raise ValueError("no rollout has a score")
    r, ids, mean = filled[keep], ids[keep], rewards[keep].nanmean(0)
    x, group = _centre(r, ids, w)
    total = x.sum(0)
    size, variance, whole = (group.each(v) for v in (group.size, _variance(x, group), _variance(total, group)))
    share = group.each(group.sum(x * total) / group.others).sum(1) / whole.sum()     # cov(component, total): sums to one
    cancel = group.each(group.norm(_unit_(x, group).sum(0))) < 0.1
    varies, rho = variance > 0, reward_correlation(r * w, ids)
    live = varies.any(0)
    largest = torch.bincount(variance[:, live].argmax(0), minlength=k) / live.sum()
    names = [str(name) for name in names or (f"reward {i}" for i in range(k))]
    width = max(map(len, ("advantage", *names))) + 2

    print(f"{len(r)} rollouts in {len(size)} group{'s'[:len(size) > 1]} of {'-'.join({f'{n:.0f}': 0 for n in size.aminmax()})}"
          f"; {len(keep) - len(r)} more lack a score and are left out\ndead groups (nothing varies): {(~live).sum()}; live "
          f"groups whose components cancel (CorrGRPO divides by less than 0.1): {(live & cancel).sum()}")
    if not live.any():
        return print("Nothing varies in any group: every advantage is 0.")
    print(f"\n{'component':{width}}  weight      mean  deviation  constant  largest  variance     share")
    for i, name in enumerate(names):
        print(f"{name:{width}}{w[i]:8.4g}{mean[i]:10.4f}{variance[i].sqrt().mean():11.4f}{(~varies[i]).double().mean():10.1%}"
              f"{largest[i]:9.1%}{variance[i].sum() / whole.sum():10.1%}{share[i]:10.1%}")
    print("deviation: in a group, weighted; constant: share of groups; largest: share of live groups in which it varies most;\n"
          "variance: its own over the total's; share: its part of the total's variance, covariances included\n"
          f"{names[share.argmax()]} has the largest part in what GRPO divides by: {share.max():.1%}\n\n"
          "mean correlations, over the groups where both vary")
    for i in range(1, k):
        pairs = [(names[j], rho[varies[i] & varies[j], i, j]) for j in range(i)]
        print(f"{names[i]:{width}}" + "  ".join(f"{name} {c.mean():.4f}" if len(c) else f"{name} -" for name, c in pairs))
    print(f"\n{'advantage':{width}}  mean |A|  largest |A|  mean |A| / mean |R - mean(R)|")
    for name, estimator in ESTIMATORS.items():
        a, centred = estimator(r, ids, w).abs(), dr_grpo(r, ids, w).abs()
        print(f"{name:{width}}{a.mean():10.4f}{a.max():13.4f}{a.sum() / centred.sum():31.4f}")


def read_rewards(files: Sequence[str]) -> tuple[Tensor, Tensor, list[str]]:
    """(rewards [N, K], NaN where missing; ids [N]; names) from JSON lines {"group": ..., "rewards": {name: number or null}};
    the rewards may also stand flat beside "group". "step" tells groups apart; a row with an "error" has no score."""
    rows, ids = [], {}
    with fileinput.input(files, encoding="utf-8") as lines:
        for line in filter(str.strip, lines):
            where = f"{lines.filename()}:{lines.filelineno()}"
            try:
                row = json.loads(line)
            except ValueError as e:
                raise ValueError(f"{where}: no JSON: {e}") from None
            if not isinstance(row, dict) or "group" not in row or not isinstance(row.get("rewards", {}), dict | None):
                raise ValueError(f'{where}: expected {{"group": ..., "rewards": {{name: number or null}}}}')
            flat = {k: v for k, v in row.items() if k not in ("group", "step", "error") and isinstance(v, int | float | None)}
            scores = {} if row.get("error") else row.get("rewards", flat) or {}
            for name, value in scores.items():
                if not isinstance(value, int | float | None) or abs(value or 0) == math.inf:
                    raise ValueError(f"{where}: the reward {name} is {value!r}, neither a finite number nor null")
            rows.append((ids.setdefault((lines.filename(), str(row.get("step")), str(row["group"])), len(ids)), scores))
    names = list(dict.fromkeys(name for _, scores in rows for name in scores))
    if not names:
        raise ValueError(f"no rewards in {', '.join(files)}")
    table = [[math.nan if scores.get(name) is None else scores[name] for name in names] for _, scores in rows]
    return torch.tensor(table, dtype=torch.float64), torch.tensor([i for i, _ in rows]), names


def main() -> None:
    parser = argparse.ArgumentParser(description="Does one reward drown the others? Without FILE: the paper's Figure 2.")
    parser.add_argument("files", nargs="*", metavar="FILE.jsonl", help="logged rewards, such as runs/NAME/rollouts/*.jsonl")
    parser.add_argument("--weights", nargs="+", default=[], metavar="NAME=W", help="weights of the rewards; 1 if not given")
    args = parser.parse_args()
    args.files += [text for text in args.weights if "=" not in text]        # written after the weights
    if args.weights and not args.files:
        parser.error("--weights are those of a FILE.jsonl's rewards, and there is none")
    if not args.files:
        rewards = torch.tensor([[0.4, 0.32, 3.6], [0.32, 0.4, -2.88], [-0.4, -0.32, 2.88], [-0.32, -0.4, -3.6]]).double()
        print("The paper's Figure 2: four rollouts, three rewards, the third with nine times the deviation of the others\n")
        print("".join(f"{name:>10}" for name in ("r1", "r2", "r3", *ESTIMATORS)))
        for row in torch.column_stack([rewards, *(estimator(rewards, 4) for estimator in ESTIMATORS.values())]):
            print("".join(f"{value:10.4f}" for value in row))
        print()
        return diagnose(rewards, 4, ("r1", "r2", "r3"))
    try:
        rewards, ids, names = read_rewards(args.files)
        given = dict(text.rsplit("=", 1) for text in args.weights if "=" in text)
        for name in given.keys() - names:
            raise ValueError(f"--weights: no reward is named {name!r}; there are {', '.join(names)}")
        weights = [float(given.get(name, 1.0)) for name in names]
        diagnose(rewards, ids, names, torch.tensor(weights, dtype=torch.float64))
    except (OSError, ValueError, OverflowError) as e:
        parser.exit(2, f"{parser.prog}: {e}\n")


if __name__ == "__main__":
    main()
