"""Which layers are quantised, what the table says, and what MXFP8 costs a MoE layer in accuracy and training loss."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from kernels import mxfp8
from modules.layers.feed_forward.mlp import MLP, activated
from modules.layers.moe import MoE, update_router_biases
from modules.layers.moe.experts import Experts
from modules.precision import (
    FP32Linear,
    MXLinear,
    Row,
    apply_recipe,
    format_execution,
    format_table,
    in_high_precision,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.project = nn.Linear(64, 64)
        self.feed_forward = MoE(64, 32, 4, 2, num_shared_experts=1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.feed_forward(self.project(self.norm(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 64)
        self.dense = nn.Linear(5, 64)
        self.narrow = nn.Linear(64, 5)
        self.layers = nn.ModuleList([Block(), Block()])
        self.head = FP32Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def runs_as(rows: list[Row]) -> dict[str, str]:
    return {row.name: row.recipe for row in rows}


def test_matching_layers_are_quantised_and_every_other_one_is_listed():
    model = Model()
    rows = apply_recipe(model, "mxfp8", ["*.experts", "layers.0.*.gate_up"])
    quantised = [
        "layers.0.feed_forward.experts",
        "layers.0.feed_forward.shared.gate_up",
        "layers.1.feed_forward.experts",
    ]
    assert [name for name, recipe in runs_as(rows).items() if recipe == "mxfp8"] == quantised
    assert runs_as(rows)["layers.1.feed_forward.shared.gate_up"] == "bf16 autocast"
    assert (
        runs_as(rows)["embed"] == runs_as(rows)["head"] == runs_as(rows)["layers.0.feed_forward.router.gate"] == "fp32"
    )
    assert model.layers[0].feed_forward.experts.recipe == model.layers[0].feed_forward.shared.gate_up.recipe == "mxfp8"
    assert type(model.layers[1].feed_forward.shared.gate_up) is nn.Linear

    held = {name.rpartition(".")[0] for name, _ in model.named_parameters()}
    assert {row.name for row in rows} == held
    assert Row("layers.0.feed_forward.experts", "Experts", "4x64x64, 4x64x32", "mxfp8") in rows


def test_parameters_and_checkpoint_keys_stay():
    model = Model()
    keys, parameters = list(model.state_dict()), list(model.parameters())
    apply_recipe(model, "mxfp8", ["*"])
    assert isinstance(model.layers[0].project, MXLinear)
    assert list(model.state_dict()) == keys
    assert all(after is before for after, before in zip(model.parameters(), parameters, strict=True))
    Model().load_state_dict(model.state_dict())


def test_a_wide_glob_leaves_router_logits_and_odd_widths_alone_and_says_why():
    model = Model()
    rows = {row.name: row for row in apply_recipe(model, "mxfp8", ["*"])}
    assert rows["layers.1.project"].recipe == rows["layers.1.feed_forward.shared.down"].recipe == "mxfp8"
    assert rows["head"].recipe == rows["layers.0.feed_forward.router.gate"].recipe == "fp32"
    assert "stay in fp32" in rows["head"].note
    for name in ("dense", "narrow"):
        assert rows[name].recipe == "bf16 autocast"
        assert rows[name].note == "width 5 is not a multiple of 32"
    assert type(model.dense) is type(model.narrow) is nn.Linear
    assert type(model.head) is FP32Linear
    assert rows["embed"].recipe == "fp32"
    assert rows["layers.0.norm"].recipe == "bf16 autocast"


def test_auto_quantises_everything_on_a_cpu() -> None:
    on_cpu = nn.ModuleDict({"arch": Model()})
    everything = {row.name: row.recipe for row in apply_recipe(on_cpu, "mxfp8", ["auto"])}
    named = apply_recipe(nn.ModuleDict({"arch": Model()}), "mxfp8", ["arch.*"])
    assert everything == {row.name: row.recipe for row in named}  # numbers can be studied here, speed cannot
    with pytest.raises(ValueError, match="'auto' stands alone"):
        apply_recipe(Model(), "mxfp8", ["auto", "*.experts"])


@pytest.mark.parametrize("recipe", ["mxfp8_g128", "mxfp8"])
@pytest.mark.parametrize("experts", [None, (128, 128), (96, 128), (128, 96), (80, 128)])
@pytest.mark.parametrize("large", [False, True])
def test_auto_on_hopper_quantises_what_a_kernel_serves_and_gains(
    recipe: str, experts: tuple[int, int] | None, large: bool, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("triton")
    layers: dict[str, nn.Module] = {"small": nn.Linear(512, 512), "odd": nn.Linear(96, 4096)}
    if large:
        layers["large"] = nn.Linear(1024, 3072)
    if experts is not None:
        layers["experts"] = Experts(*experts, 4)
    arch = nn.ModuleDict(layers)
    rows = apply_recipe(nn.ModuleDict({"arch": arch}), recipe, ["auto"], capability=(9, 0))
    expected = {"arch.experts"} if experts == (128, 128) else set()
    expected |= {"arch.large"} if large and recipe == "mxfp8_g128" else set()
    assert {row.name for row in rows if row.recipe != "bf16 autocast"} == expected
    assert all(row.note for row in rows if row.name not in expected)
    notes = {row.name: row.note for row in rows}
    assert "dequantised in memory" in notes["arch.odd"]
    assert "too small to gain" in notes["arch.small"] or recipe == "mxfp8"
    if experts == (80, 128):
        assert notes["arch.experts"] == "width 80 is not a multiple of 32"
    assert ("no layer of this model gains" in caplog.text) == (not expected)


@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_auto_quantises_nothing_on_a_gpu_without_kernels_that_take_codes(
    capability: tuple[int, int], caplog: pytest.LogCaptureFixture
) -> None:
    arch = nn.ModuleDict({"arch": nn.ModuleDict({"large": nn.Linear(1024, 3072), "experts": Experts(128, 128, 4)})})
    rows = apply_recipe(arch, "mxfp8_g128", ["auto"], capability=capability)
    assert {row.recipe for row in rows} == {"bf16 autocast"}
    assert 'precision.quantize=["arch.*"]' in caplog.text


@pytest.mark.parametrize(
    ("recipe", "globs", "message"),
    [
        ("fp8", [], r"unknown precision 'fp8'; choose one of \['bf16', 'fp32', 'mxfp8', 'mxfp8_g128'\]"),
        ("mxfp8", [], r"name layers, e\.g\. quantize=\['\*\.experts'\]"),
        ("bf16", ["*.experts"], r"bf16 quantises nothing, yet quantize=\['\*\.experts'\]"),
        (
            "mxfp8",
            ["*.experts", "*.expert"],
            r"'\*\.expert' quantises nothing.*no module.*layers\.0\.feed_forward\.experts",
        ),
        (
            "mxfp8",
            ["*.gate"],
            r"'\*\.gate' quantises nothing.*router\.gate \(router gates and logit layers stay in fp32\)",
        ),
        ("mxfp8", ["dense"], r"dense \(width 5 is not a multiple of 32\)"),
        ("mxfp8", ["embed"], r"embed \(neither nn\.Linear nor MoE experts\)"),
    ],
)
def test_globs_that_do_nothing_are_errors(recipe, globs, message):
    model = Model()
    with pytest.raises(ValueError, match=message):
        apply_recipe(model, recipe, globs)
    assert model.layers[0].feed_forward.experts.recipe == "none"


@pytest.mark.parametrize("recipe", ["fp32", "bf16"])
def test_other_precisions_quantise_nothing(recipe):
    model = Model()
    rows = runs_as(apply_recipe(model, recipe, []))
    assert (
        rows["layers.0.project"]
        == rows["layers.0.feed_forward.experts"]
        == {"fp32": "fp32"}.get(recipe, "bf16 autocast")
    )
    assert rows["head"] == "fp32"
    assert not any(isinstance(module, MXLinear) for module in model.modules())


def test_table_joins_the_layers_of_a_list():
    lines = format_table(apply_recipe(Model(), "mxfp8", ["*.experts"])).splitlines()
    assert lines[0].split() == ["module", "kind", "shape", "runs", "as", "count", "note"]
    experts = [line.split() for line in lines if "experts" in line]
    assert experts == [["layers.*.feed_forward.experts", "Experts", "4x64x64,", "4x64x32", "mxfp8", "2"]]
    assert len(lines) == 1 + 4 + 6  # heading; embed, dense, narrow, head; the modules of a block


def test_layers_that_differ_in_precision_keep_lines_of_their_own():
    table = format_table([Row("a.0.b", "Linear", "4x4", "mxfp8"), Row("a.1.b", "Linear", "4x4", "bf16 autocast")])
    assert [line.split()[0] for line in table.splitlines()] == ["module", "a.*.b", "a.*.b"]


def test_the_way_of_multiplying_is_named_for_each_kind_of_layer():
    model = Model()
    assert format_execution(model) == ""
    apply_recipe(model, "mxfp8_g128", ["*.experts", "*.project"])
    assert format_execution(model).splitlines() == [
        "mxfp8_g128, 2 x MXLinear, by reference: operands dequantised exactly to float32, added in float32",
        "mxfp8_g128, 2 x Experts, by reference: operands dequantised exactly to float32, added in float32",
    ]


@pytest.mark.parametrize(
    ("recipe", "dim", "how"),
    [
        ("mxfp8_g128", 128, "hopper: FP8 products of codes, their sums over 128 terms scaled and added in float32"),
        (
            "mxfp8",
            128,
            "hopper: operands dequantised exactly to bfloat16 on their way to the products, added in float32",
        ),
        ("mxfp8", 96, "hopper: operands dequantised exactly to bfloat16, added in float32"),
        ("mxfp8", 80, "reference: operands dequantised exactly to bfloat16, added in float32"),
    ],
)
def test_experts_on_hopper_name_their_path(recipe, dim, how, monkeypatch):
    pytest.importorskip("triton")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    with FakeTensorMode():
        gate_up = torch.empty(4, 256, dim, device="cuda")
    assert mxfp8.experts_execution(gate_up, recipe, mxfp8.QUANTIZED[recipe]) == how


def test_quantised_linear_multiplies_quantised_operands():
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(64, 32))
    x = torch.randn(3, 40, 64)
    apply_recipe(layer, "mxfp8", ["0"])
    weight, bias = layer[0].weight, layer[0].bias
    operands = [mxfp8.dequantize(mxfp8.quantize(operand)) for operand in (x, weight)]
    # The same numbers multiplied in fp32; only the order of sums differs.
    torch.testing.assert_close(layer(x), operands[0] @ operands[1].t() + bias, rtol=1e-5, atol=1e-5)
    assert (layer(x) - nn.functional.linear(x, weight, bias)).abs().max() > 1e-3


def test_a_quantised_layer_leaves_its_bias_to_the_activation(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    mlp = MLP(64, [32], 32)
    x = torch.randn(40, 64)
    apply_recipe(mlp, "mxfp8_g128", ["*"])
    expected = mlp[3](nn.functional.silu(mlp[0](x)))
    monkeypatch.setattr(MXLinear, "forward", lambda self, x: mxfp8.linear(x, self.weight, self.bias, recipe="none"))
    hidden = activated(mlp[0], x, "silu")
    monkeypatch.undo()
    torch.testing.assert_close(mlp[3](hidden), expected)


@pytest.mark.parametrize("factor", [False, True])
def test_two_layers_of_one_recipe_are_one_operator(monkeypatch: pytest.MonkeyPatch, factor: bool) -> None:
    torch.manual_seed(0)
    mlp, x = MLP(64, [96], 32), torch.randn(2, 20, 64)
    gate = (torch.randn(2, 20, 32),) * factor
    served = []
    silu_mlp = mxfp8.silu_mlp
    monkeypatch.setattr(
        mxfp8, "silu_mlp", lambda *args, recipe: served.append(recipe) or silu_mlp(*args, recipe=recipe)
    )

    def both() -> Tensor:
        y = mlp[3](nn.functional.silu(mlp[0](x)))
        return y * gate[0] if gate else y

    apply_recipe(mlp, "mxfp8_g128", ["*"])
    torch.testing.assert_close(mlp(x, *gate), both())
    assert served == ["mxfp8_g128"]
    mlp[3].recipe = "mxfp8"
    torch.testing.assert_close(mlp(x, *gate), both())
    with in_high_precision(mlp):
        torch.testing.assert_close(mlp(x, *gate), both())
    apply_recipe(mlp, "mxfp8_g128", ["*"])
    mlp[0].register_forward_hook(lambda *facts: None)
    torch.testing.assert_close(mlp(x, *gate), both())
    assert served == ["mxfp8_g128"]


def test_fp32_linear_ignores_autocast():
    torch.manual_seed(0)
    layer, x = FP32Linear(64, 3), torch.randn(10, 64)
    expected = nn.functional.linear(x, layer.weight, layer.bias)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), expected)
        assert layer(x.bfloat16()).dtype == torch.float32
    assert layer.double()(x.double()).dtype == torch.float64


QUANTISED = ["*experts", "shared.*"]


def gradients(moe: MoE, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    tokens = x.clone().requires_grad_()
    moe.zero_grad()
    y = moe(tokens)
    y.backward(upstream)
    return {"y": y.detach(), "x": tokens.grad, **{name: p.grad.clone() for name, p in moe.named_parameters()}}


@pytest.mark.parametrize("recipe", ["mxfp8", "mxfp8_g128"])
def test_quantised_moe_keeps_the_signal(recipe):
    """Output and every gradient of an MXFP8 layer against the same layer in fp32.

    E4M3 rounds to an eighth of a binade's lower end: error power (1/8)^2 / 12 against a mean square near 2, 32 dB for a
    quantised operand and 29 dB for a product of two. The output takes the errors of two products through SwiGLU (26 dB)
    and one more product: 24 dB. Every gradient passes as many roundings. 22 dB leaves 2 dB for a small layer; a layer
    that was not quantised would be beyond 30.
    """
    torch.manual_seed(0)
    moe = MoE(128, 64, 4, 2, num_shared_experts=1)
    x, upstream = torch.randn(257, 128), torch.randn(257, 128)
    reference = gradients(moe, x, upstream)
    apply_recipe(moe, recipe, QUANTISED)
    for name, value in gradients(moe, x, upstream).items():
        signal_to_noise = 20 * torch.log10(reference[name].norm() / (value - reference[name]).norm())
        assert 22 < signal_to_noise < 30, name


def test_quantised_moe_takes_no_tokens():
    moe = MoE(64, 32, 4, 2, num_shared_experts=1)
    apply_recipe(moe, "mxfp8", QUANTISED)
    result = gradients(moe, torch.empty(0, 64), torch.empty(0, 64))
    assert result["y"].shape == result["x"].shape == (0, 64)
    assert not any(value.any() for value in result.values())


def train(recipe: str, globs: list[str]) -> Tensor:
    """Losses of a small MoE that learns a fixed random network, on the same batches from the same start."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32)).requires_grad_(False)
    for parameter in teacher.parameters():
        parameter.mul_(3)
    student = MoE(32, 64, 4, 2, num_shared_experts=1)
    apply_recipe(student, recipe, globs)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3)
    losses = []
    for _ in range(150):
        x = torch.randn(256, 32)
        with torch.autocast("cpu", torch.bfloat16):
            y = student(x)
        loss = (y.float() - teacher(x)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        update_router_biases(student)
        losses.append(loss.detach())
    return torch.stack(losses)


def test_mxfp8_training_follows_bf16():
    bf16, mxfp8_losses = train("bf16", []), train("mxfp8", QUANTISED)
    assert bf16[-30:].mean() < bf16[0] / 3
    # The student starts near 0, so the first loss is the target's power and bounds the output's. Quantisation noise of
    # the output at 23 dB adds 10^-2.3 of that to the squared error; learning from noisy gradients must not add more.
    gap = (mxfp8_losses[-30:].mean() - bf16[-30:].mean()).abs()
    assert 0 < gap < 10**-2.3 * bf16[0]


def test_in_high_precision_is_the_unquantised_model_and_ends() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.SiLU(), nn.Linear(64, 32))
    x = torch.randn(4, 32)
    plain = model(x)
    apply_recipe(model, "mxfp8", ["*"])
    quantised = model(x)
    with in_high_precision(model):
        assert torch.equal(model(x), plain)
    assert not torch.equal(quantised, plain)
    assert torch.equal(model(x), quantised)
