from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import check_on_ranks, needs_compiler, tiny_run
from torch.optim import SGD

from model import GPT, GPTConfig
from optimizers import Muon, orthogonalize
from parallel import SINGLE_PROCESS
from runtime.errors import UserError
from train_gpt2 import build_optimizers
from training.config import TrainConfig
from training.groups import GroupSettings, check_optimizers

RATE, DECAY, MOMENTUM = 0.02, 0.1, 0.95


def new_muon(parameters, dtype=torch.float32, rows=(), compiled=False):
    return Muon(
        [{"params": parameters, "rows": rows}],
        lr=RATE,
        weight_decay=DECAY,
        momentum=MOMENTUM,
        ranks=SINGLE_PROCESS,
        dtype=dtype,
        compile=compiled,
    )


def train(optimizer, parameters, gradients):
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()


def random_matrices(*shapes, steps=3):
    """Parameters, and their gradients in each step."""
    generator = torch.Generator().manual_seed(0)
    first, *rest = [[torch.randn(s, generator=generator) for s in shapes] for _ in range(steps + 1)]
    return [torch.nn.Parameter(p) for p in first], rest


def reference_step(weights, average, gradient):
    """One step of Muon on one matrix, as its sources have it, in NumPy's double precision."""
    average = MOMENTUM * average + (1 - MOMENTUM) * gradient
    x = (1 - MOMENTUM) * gradient + MOMENTUM * average
    x = x / np.sqrt((x**2).sum())
    for _ in range(5):
        gram = x @ x.T
        x = 3.4445 * x - 4.7750 * gram @ x + 2.0315 * gram @ gram @ x
    rows, columns = weights.shape
    weights = weights - RATE * DECAY * weights
    return weights - RATE * 0.2 * np.sqrt(max(rows, columns)) * x, average


@pytest.mark.parametrize(
    ("shape", "compiled"),
    [
        *(((24, 24), False), ((48, 12), False), ((12, 48), False)),
        pytest.param((48, 12), True, marks=[needs_compiler, pytest.mark.slow]),
    ],
)
def test_muon_equals_a_double_precision_reference(shape, compiled):
    parameters, gradients = random_matrices(shape)
    weights = parameters[0].detach().double().numpy()
    average = np.zeros(shape)
    for (gradient,) in gradients:
        weights, average = reference_step(weights, average, gradient.double().numpy())
    train(new_muon(parameters, compiled=compiled), parameters, gradients)
    np.testing.assert_allclose(parameters[0].detach().numpy(), weights, rtol=0, atol=2e-6)


def test_muon_in_bfloat16_is_near_to_torchs():
    shapes = ((32, 32), (96, 32), (32, 96), (32, 32))
    parameters, gradients = random_matrices(*shapes)
    theirs = [torch.nn.Parameter(p.detach().clone()) for p in parameters]
    adjusted = {"lr": RATE, "weight_decay": DECAY, "adjust_lr_fn": "match_rms_adamw"}
    train(torch.optim.Muon(theirs, **adjusted), theirs, gradients)
    before = [p.detach().clone() for p in parameters]
    train(new_muon(parameters, torch.bfloat16), parameters, gradients)
    for ours, their, start in zip(parameters, theirs, before, strict=True):
        assert (ours - their).norm() < 0.02 * (their - start).norm()


@pytest.mark.parametrize("rows", [(12, 12, 12), (12, 4, 4), (24, 1, 12)])
def test_muon_orthogonalizes_stacked_matrices_one_by_one(rows):
    """Queries, keys and values, of which keys and values may have fewer rows."""
    (whole,), gradients = random_matrices((sum(rows), 12))
    parts = [torch.nn.Parameter(part.clone()) for part in whole.detach().split(rows)]
    train(new_muon([whole], rows=rows), [whole], gradients)
    train(new_muon(parts), parts, [gradient.split(rows) for (gradient,) in gradients])
    torch.testing.assert_close(whole, torch.cat(parts), rtol=0, atol=1e-6)


def test_orthogonalize_brings_singular_values_near_one_and_keeps_their_vectors():
    u, _, v = torch.linalg.svd(torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0)))
    values = torch.logspace(-1.5, 2, 16)
    result = orthogonalize(u @ torch.diag(values) @ v[:, :16])
    kept = u.mT @ result @ v[:, :16].mT
    diagonal = kept.diagonal(dim1=1, dim2=2)
    assert (diagonal[:, 4:] > 0.6).all()
    assert (diagonal < 1.3).all()
    torch.testing.assert_close(kept, torch.diag_embed(diagonal), rtol=0, atol=1e-4)


RANKS_CHECK = """
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from optimizers import Muon
from parallel import FSDP, Ranks, SINGLE_PROCESS

def check(dist_info):
    mesh = init_device_mesh("cpu", (2,))
    torch.manual_seed(0)
    shapes = [(9, 16)] * 5 + [(16, 4)] * 6  # 9 rows over two ranks: five and four
    weights, *gradients = ([torch.randn(shape) for shape in shapes] for _ in range(3))
    results, gathered = [], []
    for ranks in (SINGLE_PROCESS, Ranks(**vars(dist_info)), FSDP(**vars(dist_info))):
        def place(full):
            shards = isinstance(ranks, FSDP)
            return distribute_tensor(full, mesh, [Shard(0)]) if shards else full.clone()
        parameters = [torch.nn.Parameter(place(weight)) for weight in weights]
        settings = dict(weight_decay=0.1, momentum=0.95, dtype=torch.float32, compile=False)
        muon = Muon([{"params": [p]} for p in parameters], lr=0.1, ranks=ranks, **settings)
        for step in gradients:
            for parameter, gradient in zip(parameters, step, strict=True):
                parameter.grad = place(gradient)
            with CommDebugMode() as communication:
                muon.step()
        gathered.append({str(name): n for name, n in communication.get_comm_counts().items()})
        results.append([ranks.gather(parameter) for parameter in parameters])
    # Of each shape the updates, if they are sharded, and what the other rank has orthogonalized.
    slices, updates = {"c10d._allgather_base_": 2}, {"c10d_functional.all_gather_into_tensor": 2}
    assert gathered == [{}, slices, updates | slices], gathered
    for alone, shared, sharded in zip(*results, strict=True):
        torch.testing.assert_close(alone, shared, rtol=0, atol=1e-6)
        torch.testing.assert_close(alone, sharded, rtol=0, atol=1e-6)
"""


def test_ranks_share_the_matrices_and_gather_those_of_one_shape_together(commands, tmp_path):
    check_on_ranks(commands, RANKS_CHECK, tmp_path)


@pytest.mark.gpt2
def test_build_optimizers_gives_muon_the_blocks_matrices(tiny_data, tmp_path):
    with torch.device("meta"):
        model = GPT(GPTConfig())
    with tiny_run(tiny_data, tmp_path, optimizer="muon") as run:
        muon, adamw = build_optimizers(model, run)
    names = {parameter: name for name, parameter in model.named_parameters()}
    matrices = {names[p]: g["rows"] for g in muon.param_groups for p in g["params"]}
    assert len(matrices) == 12 * 4
    assert {name for name, rows in matrices.items() if rows == (768, 768, 768)} == {
        f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(12)
    }
    others = {names[p] for group in adamw.param_groups for p in group["params"]}
    assert matrices.keys() | others == set(names.values())
    assert not matrices.keys() & others
    assert {group["weight_decay"] for group in muon.param_groups} == {0.1}


@pytest.mark.parametrize(
    ("batch", "beta2"), [(1_048_576, 0.95), (524_288, 0.95), (2_048, 0.95 ** (1 / 256))]
)
def test_adamw_remembers_as_many_tokens_at_every_batch(batch, beta2):
    config = TrainConfig(total_batch_size=batch)
    assert config.adam_beta2 == pytest.approx(beta2)
    assert replace(config, beta2=0.9).adam_beta2 == 0.9  # what is given is what counts


class ScheduleFree(SGD):
    """Changes two numbers of its group in each step, as schedule-free optimizers do."""

    def step(self):
        for group in self.param_groups:
            group["momentum"] /= 2
            group["weight_sum"] = group.get("weight_sum", 0.0) + 1.0


def new_settings(weight_decay=0.1):
    """An optimizer of two groups, the second with an `lr` of its own, and their settings."""
    first, second = (torch.nn.Parameter(torch.zeros(2)) for _ in range(2))
    groups = [{"params": [first]}, {"params": [second], "lr": 0.4, "momentum": 0.6}]
    optimizer = ScheduleFree(groups, lr=0.1, weight_decay=weight_decay, momentum=0.8)
    return optimizer, GroupSettings([optimizer])


def values(optimizer, name):
    return [group.get(name) for group in optimizer.param_groups]


def test_group_settings_scale_the_numbers_that_groups_were_built_with():
    optimizer, settings = new_settings()
    for _ in range(2):  # the factors do not add up
        settings.multiply({"lr": 0.5, "weight_decay": 2.0})
        assert values(optimizer, "lr") == [0.05, 0.2]
        assert values(optimizer, "weight_decay") == [0.2, 0.2]
    assert values(optimizer, "momentum") == [0.8, 0.6]
    with pytest.raises(ValueError, match="no parameter group has a moment or rate, which"):
        settings.multiply({"lr": 1.0, "rate": 1.0, "moment": 1.0})
    torch.optim.lr_scheduler.ConstantLR(optimizer)
    with pytest.raises(UserError, match="replaces what a torch scheduler sets: add the schedule"):
        settings.multiply({"lr": 1.0})


def test_group_settings_save_what_optimizers_change_and_keep_changed_flags():
    optimizer, settings = new_settings()
    settings.multiply({"lr": 0.5})
    assert settings.state() == [{}, {}]
    optimizer.step()
    saved = settings.state()
    assert saved == [{"momentum": 0.4, "weight_sum": 1.0}, {"momentum": 0.3, "weight_sum": 1.0}]
    other, resumed = new_settings(weight_decay=0.7)
    resumed.load_state(saved)
    assert values(other, "weight_sum") == [1.0, 1.0]
    assert values(other, "momentum") == [0.4, 0.3]
    assert values(other, "weight_decay") == [0.7, 0.7]
    assert values(other, "lr") == [0.1, 0.4]
    assert resumed.state() == saved
    resumed.load_state([])  # of an older checkpoint
    with pytest.raises(ValueError, match=r"state of 1 parameter groups, but .* builds 2"):
        resumed.load_state(saved[:1])


@pytest.mark.parametrize(
    ("change", "lost"),
    [
        (lambda o: o.param_groups[1].update(seen=torch.ones(())), "seen"),
        (lambda o: o.param_groups[0]["mean"].add_(1), "mean"),
        (lambda o: o.param_groups[0]["seeds"].append(3), "seeds"),
        (lambda o: setattr(o, "updates", 1), "ScheduleFree.updates"),
        (lambda o: o.total.add_(1), "ScheduleFree.total"),
        (lambda o: o.momenta[0].add_(1), "ScheduleFree.momenta"),
        (lambda o: o.averages.update({o.weights[0]: torch.zeros(2)}), "ScheduleFree.averages"),
        (lambda o: o.inner.state.update({o.weights[0]: {"sum": 1}}), "ScheduleFree.inner"),
        (lambda o: o.param_groups[0]["views"][0].add_(1), "views"),
    ],
)
def test_group_settings_refuse_changes_that_a_resume_would_lose(change, lost):
    optimizer, _ = new_settings()
    optimizer.param_groups[0] |= {"mean": torch.zeros(2), "seeds": [1, 2], "label": "first"}
    optimizer.param_groups[0] |= {"views": [torch.zeros(2)], "coefficients": np.ones(2)}
    optimizer.updates, optimizer.total = 0, torch.zeros(())
    optimizer.weights = [p for group in optimizer.param_groups for p in group["params"]]
    optimizer.momenta, optimizer.averages = [torch.zeros(2)], {}
    optimizer.inner = SGD(optimizer.weights, lr=0.1)
    settings = GroupSettings([optimizer])
    optimizer.step()
    optimizer.weights[0].data.add_(1)
    assert all("weight_sum" in group for group in settings.state())
    change(optimizer)
    with pytest.raises(UserError, match=f"cannot hold {lost}, which the optimizer changed"):
        settings.state()


def test_an_optimizer_of_a_parameter_that_the_model_lacks_is_an_error():
    model = torch.nn.Linear(2, 2)
    outside = torch.nn.Parameter(torch.zeros(3))
    optimizer = SGD([*model.parameters(), outside], lr=0.1)
    with pytest.raises(UserError, match=r"of shape \[\(3,\)\] that the model does not have"):
        check_optimizers(model, [optimizer])
