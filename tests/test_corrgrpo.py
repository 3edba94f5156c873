"""The estimators against slow references written from the formulas, one group and one pair of components at a time."""

import math
import statistics

import pytest
import torch

from corrgrpo import ESTIMATORS, corrgrpo, denominators, dr_grpo, gdpo, grpo, reward_correlation, rloo

EPS = 1e-6


def pearson(a, b):
    a, b = [x - math.fsum(a) / len(a) for x in a], [x - math.fsum(b) / len(b) for x in b]
    return math.fsum(x * y for x, y in zip(a, b)) / math.sqrt(math.fsum(x * x for x in a) * math.fsum(y * y for y in b))


def constant(values):
    return max(values) == min(values)


def reference(name, rewards, ids, weights):
    """rewards: list of rows; returns a list. Everything in Python floats."""
    out = [0.0] * len(rewards)
    members = {g: [i for i, x in enumerate(ids) if x == g] for g in ids}
    for rows in members.values():
        columns = [[rewards[i][k] * w for i in rows] for k, w in enumerate(weights)]
        raw = [[rewards[i][k] for i in rows] for k in range(len(weights))]
        totals = [math.fsum(c[j] for c in columns) for j in range(len(rows))]
        mean = math.fsum(totals) / len(rows)
        live = [k for k, c in enumerate(columns) if not constant(c)]
        for j, i in enumerate(rows):
            centred = totals[j] - mean if live else 0.0
            if name == "corrgrpo":
                out[i] = centred / math.sqrt(max(sum(pearson(columns[k], columns[m]) for k in live for m in live), 0) + EPS)
            elif name == "grpo":
                out[i] = centred / math.sqrt((statistics.variance(totals) if len(rows) > 1 else 0.0) + EPS)
            elif name == "dr_grpo":
                out[i] = centred
            elif name == "rloo":
                out[i] = totals[j] - (math.fsum(totals) - totals[j]) / (len(rows) - 1) if len(rows) > 1 and live else 0.0
            elif name == "gdpo":
                out[i] = math.fsum(w * (c[j] - math.fsum(c) / len(c)) / math.sqrt(statistics.variance(c) + EPS)
                                   for w, c in zip(weights, raw) if not constant(c))
    if name == "gdpo":
        mean = math.fsum(out) / len(out)
        deviation = math.sqrt((statistics.variance(out) if len(out) > 1 else 0.0) + EPS)
        out = [(x - mean) / deviation for x in out]
    return out


def close(got, want, rel=1e-6):
    want = torch.tensor(want, dtype=torch.float64)
    assert got.shape == want.shape
    assert torch.allclose(got.double(), want, rtol=rel, atol=rel * max(want.abs().max().item(), 1e-12)), (got, want)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 16])
@pytest.mark.parametrize("k", [1, 2, 3, 8])
def test_agrees_with_the_formula_on_random_rewards(name, size, k):
    g = torch.Generator().manual_seed(1000 * size + k)
    scale = 10.0 ** torch.empty(k, dtype=torch.float64).uniform_(-3, 3, generator=g)
    rewards = torch.randn(5 * size, k, dtype=torch.float64, generator=g) * scale
    weights = torch.rand(k, dtype=torch.float64, generator=g) * 2 - 0.5
    ids = torch.arange(5).repeat_interleave(size) * 7 - 3
    want = reference(name, rewards.tolist(), ids.tolist(), weights.tolist())
    close(ESTIMATORS[name](rewards, size, weights), want)
    order = torch.randperm(len(ids), generator=g)
    close(ESTIMATORS[name](rewards[order], ids[order], weights), [want[i] for i in order])


@pytest.mark.parametrize("name", ESTIMATORS)
def test_groups_of_unequal_size_in_any_order(name):
    g = torch.Generator().manual_seed(0)
    ids = torch.cat([torch.full((n,), i) for i, n in enumerate([1, 2, 16, 5, 1, 3])])[torch.randperm(28, generator=g)]
    rewards = torch.randn(28, 4, dtype=torch.float64, generator=g)
    rewards[:, 2] = (rewards[:, 2] > 0).double()
    close(ESTIMATORS[name](rewards, ids), reference(name, rewards.tolist(), ids.tolist(), [1.0] * 4))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("size", [3, 6, 7, 8, 12])
@pytest.mark.parametrize("value", [0.1, 0.35, -0.7, 1e3 + 0.1])
def test_a_constant_component_counts_for_nothing(dtype, size, value):
    rewards = torch.stack([torch.full((size,), value), torch.arange(size)], 1).to(dtype)
    for groups in (size, torch.zeros(size, dtype=torch.long)):
        rho = reward_correlation(rewards, groups)
        assert rho[0, 0].tolist() == [0, 0] and rho[0, 1, 0] == 0 and abs(rho[0, 1, 1] - 1) < 1e-6
        close(corrgrpo(rewards, groups), reference("corrgrpo", rewards[:, 1:].tolist(), [0] * size, [1.0]))
        for estimator in ESTIMATORS.values():
            assert (estimator(rewards[:, :1], groups) == 0).all()


def test_constant_up_to_rounding_is_constant():
    """Seven times 0.1 computed in seven ways differs in the last bit; that is no signal."""
    a = torch.tensor([0.1, 0.3 - 0.2, 0.7 / 7, 1 - 0.9, 0.05 * 2, 0.1, 1.1 - 1.0], dtype=torch.float32)
    assert a.max() > a.min()
    rewards = torch.stack([a, torch.arange(7.0)], 1)
    assert abs(reward_correlation(rewards, 7).sum().item() - 1) < 1e-6


def test_seven_equal_and_one_different():
    rewards = torch.tensor([[0.35]] * 7 + [[1.0]])
    close(corrgrpo(rewards, 8), reference("corrgrpo", rewards.tolist(), [0] * 8, [1.0]))
    assert rloo(rewards, 8)[:7].unique().numel() == 1
    assert grpo(rewards, 8).abs().max() < 3


def test_one_component_gives_the_centred_reward():
    rewards = torch.tensor([[0.0], [1.0], [2.0], [5.0]])
    assert torch.allclose(corrgrpo(rewards, 4), rewards[:, 0] - 2.0, rtol=1e-6)


def test_opposed_components_give_a_thousand_times_the_centred_total():
    rewards = torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0], [0.0, 1.0]])
    assert torch.allclose(corrgrpo(rewards, 4, torch.tensor([1.0, 0.5])), torch.tensor([250.0, -250, 250, -250]))


def test_the_papers_figure_2():
    """Correlations 0.9756, 0.1098, 0.1098; the third deviation nine times the others; multipliers 0.2536 and 0.4307."""
    rewards = torch.tensor([[0.4, 0.32, 3.6], [0.32, 0.4, -2.88], [-0.4, -0.32, 2.88], [-0.32, -0.4, -3.6]])
    rho = reward_correlation(rewards, 4)[0]
    assert [round(rho[i, j].item(), 4) for i, j in ((0, 1), (0, 2), (1, 2))] == [0.9756, 0.1098, 0.1098]
    divided_by = denominators(rewards, 4)
    assert round(1 / divided_by["grpo"][0].item(), 4) == 0.2536
    assert round(1 / divided_by["corrgrpo"][0].item(), 4) == 0.4307


def test_weights_scale_corrgrpo_and_not_grpo():
    rewards = torch.rand(16, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    w = torch.tensor([1.0, 2.0, 0.5])
    assert torch.allclose(corrgrpo(rewards, 8, 2 * w), 2 * corrgrpo(rewards, 8, w))
    assert torch.allclose(grpo(rewards, 8, 2 * w), grpo(rewards, 8, w), rtol=1e-4)
    assert torch.equal(corrgrpo(rewards, 8, torch.tensor([1.0, 0.0, 1.0])), corrgrpo(rewards[:, [0, 2]], 8))


def test_correlation_matrices_come_in_order_of_first_appearance():
    rewards = torch.tensor([[0.0, 0], [1, 1], [0, 1], [1, 0], [2, 2], [2, -1]])
    rho = reward_correlation(rewards, torch.tensor([9, 9, 4, 4, 9, 4]))
    assert torch.allclose(rho[0], torch.ones(2, 2)) and torch.allclose(rho[1], torch.tensor([[1.0, -1], [-1, 1]]))
    assert torch.allclose(rho, torch.stack([torch.corrcoef(rewards[[0, 1, 4]].T), torch.corrcoef(rewards[[2, 3, 5]].T)]))


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool])
def test_keeps_the_dtype(name, dtype):
    rewards = torch.tensor([[1, 0], [0, 1], [1, 1], [0, 0]]).to(dtype)
    want = dtype if dtype.is_floating_point else torch.float32
    assert ESTIMATORS[name](rewards, 4).dtype == want
    close(ESTIMATORS[name](rewards, 4), ESTIMATORS[name](rewards.double(), 4).tolist(), rel=1e-2)


@pytest.mark.parametrize("estimator", ESTIMATORS.values())
def test_bad_input_is_named(estimator):
    bad = torch.zeros(4, 3)
    bad[2, 1] = math.inf
    with pytest.raises(ValueError, match="rollout 2, component 1 is inf"):
        estimator(bad, 4)
    with pytest.raises(ValueError, match="rollout 0, component 0 is nan"):
        estimator(torch.full((4, 1), math.nan), torch.zeros(4, dtype=torch.long))
    with pytest.raises(ValueError, match="groups of 3"):
        estimator(torch.zeros(4, 3), 3)
    with pytest.raises(ValueError, match=r"\[4\] integer ids"):
        estimator(torch.zeros(4, 3), torch.zeros(3, dtype=torch.long))
    with pytest.raises(ValueError, match="integer ids"):
        estimator(torch.zeros(4, 3), torch.zeros(4))
    with pytest.raises(ValueError, match="3 finite numbers"):
        estimator(torch.zeros(4, 3), 4, torch.ones(2))
    with pytest.raises(ValueError, match=r"\[rollouts, components\]"):
        estimator(torch.zeros(4), 4)


def test_groups_of_one_and_no_rollouts():
    for estimator in (corrgrpo, grpo, dr_grpo, rloo, gdpo):
        assert (estimator(torch.rand(3, 2), 1) == 0).all()
        assert estimator(torch.zeros(0, 2), 4).shape == (0,)
        assert estimator(torch.zeros(0, 2), torch.zeros(0, dtype=torch.long)).shape == (0,)
