"""The estimators against slow references written from the formulas, one group and one pair of components at a time."""

import ast
import io
import json
import math
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import corrgrpo as module
from corrgrpo import ESTIMATORS, corrgrpo, denominators, dr_grpo, gdpo, grpo, reward_correlation, rloo, skip_missing

EPS = 1e-6
NAN = math.nan
SCRIPT = Path(module.__file__)
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"))]


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


@pytest.mark.parametrize("groups", [7, torch.zeros(7, dtype=torch.long)], ids=["int", "ids"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_constant_up_to_rounding_is_constant(dtype, groups):
    """A value that was computed in several ways and differs in its last bit is no signal."""
    a = torch.full((7,), 0.1, dtype=dtype)
    a[3] = torch.nextafter(a[3], torch.tensor(1.0, dtype=dtype))
    assert a.max() > a.min()
    rewards = torch.stack([a, torch.arange(7.0).to(dtype)], 1)
    assert abs(reward_correlation(rewards, groups).sum().item() - 1) < 1e-2
    for estimator in ESTIMATORS.values():
        assert (estimator(a[:, None], groups) == 0).all()


def test_a_small_signal_on_a_large_offset_is_found():
    signal = torch.tensor([0.0, 1.0, 2.0, 3.0, 1.0, 0.0, 2.0, 2.0], dtype=torch.float64)
    other = torch.arange(8, dtype=torch.float64) % 3
    rewards = torch.stack([1e6 + 1e-3 * signal, other], 1)
    want = torch.corrcoef(torch.stack([signal, other]))[0, 1]
    assert abs(reward_correlation(rewards, 8)[0, 0, 1] - want) < 1e-6


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


# ---- missing rewards -------------------------------------------------------------------------------------------------

@pytest.mark.parametrize("name", ["corrgrpo", "grpo", "dr_grpo", "rloo"])
@pytest.mark.parametrize("groups", [4, torch.tensor([7, 7, 7, 7, 2, 2, 2, 2, 5, 5, 5, 5])], ids=["int", "ids"])
def test_a_rollout_without_a_score_is_left_out_of_its_group_alone(name, groups):
    full = torch.rand(12, 3, generator=torch.Generator().manual_seed(3))
    rewards = full.clone()
    rewards[1, 2] = NAN                                              # lacks what the others of its group have
    rewards[5] = NAN                                                 # lacks everything
    rewards[8:, 1] = NAN                                             # nobody in the group has it: not meant for this prompt
    got = skip_missing(ESTIMATORS[name], rewards, groups)
    assert got[1] == 0 and got[5] == 0 and got.isfinite().all()
    assert torch.allclose(got[[0, 2, 3]], ESTIMATORS[name](full[[0, 2, 3]], 3))
    assert torch.allclose(got[[4, 6, 7]], ESTIMATORS[name](full[[4, 6, 7]], 3))
    assert torch.allclose(got[8:], ESTIMATORS[name](full[8:, [0, 2]], 4))


@pytest.mark.parametrize("name", ESTIMATORS)
def test_without_gaps_skip_missing_changes_nothing(name):
    rewards, w = torch.rand(12, 3), torch.tensor([1.0, 0.5, 2.0])
    assert torch.equal(skip_missing(ESTIMATORS[name], rewards, 4, w), ESTIMATORS[name](rewards, 4, w))
    assert skip_missing(ESTIMATORS[name], rewards > 0.5, 4).dtype == torch.float32


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("rewards", [[[1.0], [NAN], [NAN], [NAN]], [[NAN, 0.0]] * 3 + [[NAN, NAN]], [[NAN, NAN]] * 4])
def test_a_group_with_hardly_a_score_is_dead_and_never_nan(name, rewards):
    assert skip_missing(ESTIMATORS[name], torch.tensor(rewards), 4).tolist() == [0, 0, 0, 0]


def test_gdpo_with_one_gap_stays_finite():
    got = skip_missing(gdpo, torch.tensor([[1, NAN], [0, 1.0], [1, 0], [0, 0]]), 4)
    assert got[0] == 0 and torch.allclose(got[1:], gdpo(torch.tensor([[0, 1.0], [1, 0], [0, 0]]), 3))


def test_a_component_of_weight_zero_is_not_missed():
    rewards, w = torch.tensor([[1.0, NAN], [0.0, 5.0], [3.0, 1.0]]), torch.tensor([1.0, 0.0])
    assert torch.equal(skip_missing(corrgrpo, rewards, 3, w), corrgrpo(rewards[:, :1], 3))


def test_an_infinite_reward_is_no_missing_reward():
    with pytest.raises(ValueError, match="rollout 1, component 0 is -inf"):
        skip_missing(corrgrpo, torch.tensor([[1.0], [-math.inf]]), 2)
    with pytest.raises(ValueError, match="is inf"):
        skip_missing(corrgrpo, torch.tensor([[1.0, NAN], [math.inf, 0.0], [0.0, 1.0]]), 3)


# ---- cost, and what a host does to tensors ---------------------------------------------------------------------------

class Recorder(TorchDispatchMode):
    """Notes the size of every tensor that an operation makes and how often the device is waited for."""

    def __init__(self):
        super().__init__()
        self.largest, self.waits = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        self.waits += func.overloadpacket in (torch.ops.aten._local_scalar_dense, torch.ops.aten.nonzero,
                                              torch.ops.aten._unique2, torch.ops.aten.equal)
        made = [out] if isinstance(out, torch.Tensor) else out if isinstance(out, list | tuple) else []
        self.largest = max([self.largest, *(t.untyped_storage().nbytes() for t in made)])
        return out


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("ids", [False, True])
def test_memory_is_linear_and_the_device_is_waited_for_once(name, ids):
    rewards = torch.rand(4 * 32, 50)                                 # a K x K matrix per group would be 4 x 50 x 50
    rewards = torch.cat([rewards, rewards.roll(1, 0)])
    groups = torch.arange(len(rewards)) // 4 if ids else 4
    with Recorder() as seen:
        ESTIMATORS[name](rewards, groups, torch.ones(50))
    assert seen.largest <= 8 * rewards.numel()
    assert seen.waits == 1


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("shape, groups", [((8, 3), 4), ((8, 3), 8), ((8, 3), 1), ((8, 1), 4),
                                           ((8, 3), torch.tensor([0, 1] * 4))])
def test_the_rewards_are_left_as_they_were_and_need_no_particular_layout(name, shape, groups):
    rewards = torch.rand(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    before = rewards.clone()
    got = ESTIMATORS[name](rewards, groups, torch.arange(1.0, shape[1] + 1))
    assert torch.equal(rewards, before)
    wide = torch.stack([before, before + 1], -1).requires_grad_()    # strides that are not contiguous, and a gradient
    again = ESTIMATORS[name](wide[..., 0], groups, torch.arange(1.0, shape[1] + 1))
    assert torch.equal(got, again) and not again.requires_grad
    assert torch.equal(ESTIMATORS[name](before.t().contiguous().t(), groups, torch.arange(1.0, shape[1] + 1)), got)


@pytest.mark.parametrize("name", ESTIMATORS)
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int32, torch.uint8, torch.bool])
def test_every_dtype_and_device_gives_the_float64_result(name, device, dtype):
    g = torch.Generator().manual_seed(5)
    rewards = torch.randint(0, 2 if dtype == torch.bool else 9, (64, 3), generator=g).to(device, dtype)
    w = torch.tensor([1.0, 0.5, 0.25])
    for groups in (8, torch.arange(64) // 8):
        got, want = ESTIMATORS[name](rewards, groups, w), ESTIMATORS[name](rewards.cpu().double(), groups, w)
        assert got.device.type == device and got.dtype == (dtype if dtype.is_floating_point else torch.float32)
        assert torch.equal(got.cpu(), want.to(got.dtype))


def test_a_range_that_overflows_its_dtype_is_no_error():
    rewards = torch.tensor([[3e38, 0.0], [-3e38, 1.0], [0.0, 2.0]])
    rho = reward_correlation(rewards, 3)
    assert rho.isfinite().all() and abs(rho[0, 0, 0] - 1) < 1e-6


@pytest.mark.parametrize("name", ["corrgrpo", "gdpo"])
@pytest.mark.parametrize("ids", [False, True])
def test_compiled_equals_eager(name, ids):
    torch._dynamo.reset()
    compiled = torch.compile(ESTIMATORS[name], backend="aot_eager")
    for n in (32, 64):
        rewards = torch.rand(n, 3, generator=torch.Generator().manual_seed(n))
        groups = torch.arange(n) // 8 if ids else 8
        assert torch.allclose(compiled(rewards, groups), ESTIMATORS[name](rewards, groups), rtol=1e-6)
    with pytest.raises(ValueError, match="rollout 0, component 1 is nan"):
        compiled(torch.tensor([[0.0, NAN, 0.0]] * 32), torch.arange(32) // 8 if ids else 8)


def test_the_file_stands_alone_and_parses_as_python_3_10():
    tree = ast.parse(SCRIPT.read_text(), feature_version=(3, 10))
    imported = {a.name.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    imported |= {n.module.split(".")[0] for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert imported - set(sys.stdlib_module_names) == {"torch"}


# ---- python corrgrpo.py, diagnose --------------------------------------------------------------------------------------

@pytest.fixture
def command(monkeypatch, capsys):
    def run(*args, stdin=""):
        monkeypatch.setattr(sys, "argv", [SCRIPT.name, *map(str, args)])
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        try:
            module.main()
            code = 0
        except SystemExit as e:
            code = e.code
        return code, *capsys.readouterr()
    return run


def test_the_command_shows_the_papers_figure_2():
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True)
    out = done.stdout
    assert (done.returncode, done.stderr) == (0, "")
    for figure in ("0.9756", "r1 0.1098  r2 0.1098", "91.1%", "nine times"):
        assert figure in out
    lines = [line.split() for line in out.splitlines() if line]
    multiplier = {words[0]: words[-1] for words in lines if words[0] in ESTIMATORS}
    assert multiplier["grpo"] == "0.2536" and multiplier["corrgrpo"] == "0.4307" and set(multiplier) == set(ESTIMATORS)
    deviation = {words[0]: float(words[3]) for words in lines if words[0] in ("r1", "r3") and words[-1].endswith("%")
                 and len(words) == 8}
    assert abs(deviation["r3"] / deviation["r1"] - 9) < 1e-2


def jsonl(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def test_diagnose_tells_which_reward_drowns_the_rest(capsys):
    g = torch.Generator().manual_seed(0)
    rewards = torch.rand(64, 3, generator=g) * torch.tensor([1.0, 100.0, 1.0])
    rewards[:8] = rewards[0]                                         # a dead group
    rewards[8:16, 1] = 0
    rewards[8:16, 2] = -rewards[8:16, 0]                             # a group that cancels
    rewards[63, 0] = NAN
    module.diagnose(rewards, 8, ["small", "large", "other"])
    out = capsys.readouterr().out
    assert "63 rollouts in 8 groups of 7-8; 1 more lack a score" in out
    assert "dead groups (nothing varies): 1;" in out and "divides by less than 0.1): 1" in out
    assert "large has the largest part in what GRPO divides by: 9" in out
    module.diagnose(rewards, torch.arange(64) // 8, ["small", "large", "other"])
    assert capsys.readouterr().out == out
    module.diagnose(torch.ones(4, 2), 4)
    assert "every advantage is 0" in capsys.readouterr().out


def test_the_command_reads_the_logs_of_a_run(tmp_path, command):
    """Several files; groups are counted from 0 in every step; an error or a null is no score; other keys are ignored."""
    def row(step, group, a, b, error=None):
        return {"step": step, "group": group, "task": "t", "replies": ["x"], "advantage": 0.1, "error": error,
                "rewards": None if error else {"a": a, "b": b}, "metrics": {"n": 1}}
    first = jsonl(tmp_path / "step-1.jsonl", [row(1, g, i % 2, 0.5 * i) for g in (0, 1) for i in range(4)])
    rows = [row(2, 0, i % 2, None if i == 3 else i) for i in range(4)]
    second = jsonl(tmp_path / "step-2.jsonl", [*rows, row(2, 1, 0, 0, "died")])
    code, out, err = command(first, second)
    assert (code, err) == (0, "")
    assert "11 rollouts in 3 groups of 3-4; 2 more lack a score" in out
    code, weighted, _ = command(first, second, "--weights", "a=100")
    assert code == 0 and "a has the largest part" in weighted and "b has the largest part" in out
    assert command("--weights", "a=100", first, second)[1] == weighted and command("--weights", "a=100")[0] == 2


def test_the_command_reads_flat_rows_and_standard_input(command):
    rows = [{"group": "p", "a": a, "b": b, "text": "x", "step": None} for a, b in ((1, True), (0.5, None), (0, False))]
    code, out, err = command("-", stdin="\n".join(map(json.dumps, rows)) + "\n\n")
    assert (code, err) == (0, "") and "2 rollouts in 1 group of 2; 1 more lack" in out


@pytest.mark.parametrize("text, message", [
    ("{", "<stdin>:1: no JSON"),
    ('{"group": 1, "rewards": {"a": 1}}\n[1]', "<stdin>:2: expected {"),
    ('{"rewards": {"a": 1}}', "<stdin>:1: expected {"),
    ('{"group": 1, "rewards": [1, 2]}', "<stdin>:1: expected {"),
    ('{"group": 1, "rewards": {"a": "one"}}', "the reward a is 'one'"),
    ('{"group": 1, "rewards": {"a": Infinity}}', "the reward a is inf"),
    ('{"group": 1, "rewards": null}', "no rewards in -"),
    ('{"group": 1, "rewards": {"a": null}}', "no rollout has a score"),
    ("", "no rewards in -"),
])
def test_the_command_explains_what_it_cannot_read(text, message, command):
    code, out, err = command("-", stdin=text)
    assert code == 2 and message in err and "Traceback" not in err and not out


def test_the_command_explains_files_and_weights_that_are_not_there(tmp_path, command):
    assert command(tmp_path / "none.jsonl")[0] == 2
    good = jsonl(tmp_path / "a.jsonl", [{"group": 0, "rewards": {"a": i}} for i in range(2)])
    for weight, message in (("b=1", "no reward is named 'b'; there are a"), ("a=x", "could not convert")):
        code, _, err = command(good, "--weights", weight)
        assert code == 2 and message in err
