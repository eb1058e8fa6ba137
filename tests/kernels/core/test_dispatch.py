from __future__ import annotations

import importlib
import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from kernels.core import dispatch
from kernels.core.dispatch import Backend

CPU = torch.zeros(1)


@pytest.fixture
def op(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An operator with three backends, alone in an otherwise empty registry."""
    for name, empty in (("_registry", {}), ("_forced", {}), ("_chosen", {}), ("_reported", set())):
        monkeypatch.setattr(dispatch, name, empty)
    monkeypatch.delenv(dispatch.ENVIRONMENT_VARIABLE, raising=False)

    def on_gpu(*, device: str, capability: tuple[int, int] | None, dtype: torch.dtype, width: int) -> str | None:
        return dispatch.needs_capability(device, capability, (9, 0))

    def even(*, width: int, **facts: object) -> str | None:
        return "needs an even width" if width % 2 else None

    dispatch.declare(
        "double",
        Backend("hopper", lambda: "hopper", on_gpu),
        Backend("even", lambda: "even", even),
        Backend("reference", lambda: "reference"),
        Backend("last", f"{__name__}:last"),
    )
    return "double"


def last() -> str:
    return "last"


def test_the_first_that_can_serve_is_chosen(op: str) -> None:
    assert dispatch.choose(op, None, CPU, width=2)() == "even"
    assert dispatch.choose(op, None, CPU, width=3)() == "reference"
    assert dispatch.operators() == {"double": ["hopper", "even", "reference", "last"]}


def test_choice_is_cached_per_facts_and_forgotten_on_force(op: str) -> None:
    asked = []

    def supports(**facts: object) -> None:
        asked.append(facts)

    dispatch.prefer(op, Backend("counting", lambda: "counting", supports))
    for _ in range(3):
        assert dispatch.choose(op, None, CPU, width=2)() == "counting"
    assert len(asked) == 1
    dispatch.choose(op, None, CPU, width=4)
    assert len(asked) == 2
    dispatch.force("double=even")
    assert dispatch.choose(op, None, CPU, width=2)() == "even"


def test_fallback_is_logged_once_per_reason(op: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, logger="kernels.core.dispatch")
    for width in (1, 2, 3, 5):
        dispatch.choose(op, None, CPU, width=width)
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    assert "not hopper: needs a CUDA device (sm_90), the tensors are on cpu" in messages[0]
    assert "not even: needs an even width" in messages[1]


def test_argument_beats_environment_beats_config(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    dispatch.force("even")
    assert dispatch.choose(op, None, CPU, width=2)() == "even"
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "double=reference")
    assert dispatch.choose(op, None, CPU, width=4)() == "reference"
    assert dispatch.choose(op, "even", CPU, width=4)() == "even"


def test_narrow_request_beats_a_global_one_and_an_empty_spec_clears(op: str) -> None:
    dispatch.force("reference, double=even")
    assert dispatch.choose(op, None, CPU, width=2)() == "even"
    dispatch.force("reference")
    assert dispatch.choose(op, None, CPU, width=2)() == "reference"
    dispatch.force("")
    assert dispatch.choose(op, None, CPU, width=2)() == "even"


def test_explicit_request_that_cannot_serve_raises_with_reason_and_alternatives(
    op: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(dispatch.UnsupportedError, match=r"backend argument.*needs a CUDA device.*Can serve: even, ref"):
        dispatch.choose(op, "hopper", CPU, width=2)
    dispatch.force("double=even")
    with pytest.raises(ValueError, match=r"runtime\.kernels.*needs an even width.*Can serve: reference"):
        dispatch.choose(op, None, CPU, width=3)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, "hopper")
    with pytest.raises(ValueError, match="GEMSMITH_KERNELS"):
        dispatch.choose(op, None, CPU, width=8)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dubble=even", "unknown operator 'dubble'; known: double"),
        ("double=evn", "no backend 'evn' of operator 'double'; known: even, hopper, last, reference"),
        ("evn", "no backend 'evn' of any operator; known: even, hopper, last, reference"),
    ],
)
def test_misspelt_specs_name_what_is_known(op: str, spec: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=message):
        dispatch.force(spec)
    monkeypatch.setenv(dispatch.ENVIRONMENT_VARIABLE, spec)
    with pytest.raises(ValueError, match=message):
        dispatch.choose(op, None, CPU, width=2)


def test_failed_force_leaves_the_earlier_request(op: str) -> None:
    dispatch.force("double=reference")
    with pytest.raises(ValueError, match="unknown operator"):
        dispatch.force("nothing=reference")
    assert dispatch.choose(op, None, CPU, width=2)() == "reference"


def test_misspelt_names_in_calls_name_what_is_known(op: str) -> None:
    with pytest.raises(ValueError, match="unknown operator 'dubble'; known: double"):
        dispatch.choose("dubble", None, CPU)
    with pytest.raises(ValueError, match=r"double has no backend 'evn'.*it has: hopper, even, reference, last"):
        dispatch.choose(op, "evn", CPU, width=2)


def test_a_backend_behind_the_specification_is_imported_and_serves_by_name_only(op: str) -> None:
    assert dispatch.choose(op, "last", CPU, width=2)() == "last"


def test_declarations_refuse_what_would_be_ambiguous(op: str) -> None:
    with pytest.raises(ValueError, match="already has a backend 'even'"):
        dispatch.prefer(op, Backend("even", lambda: None))
    with pytest.raises(ValueError, match="double is declared already"):
        dispatch.declare(op, Backend("other", lambda: None))


def test_a_compiler_imports_a_backend_and_does_not_trace_the_import(
    op: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "doubling.py").write_text("def double(x):\n    return 2 * x\n")
    monkeypatch.syspath_prepend(tmp_path)
    dispatch.prefer(op, Backend("doubling", "doubling:double"))
    compiled = torch.compile(lambda x: dispatch.choose(op, None, x, width=1)(x), backend="eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]


def test_explain_answers_for_a_machine_that_is_not_here(op: str) -> None:
    text = dispatch.explain(op, device="cuda", capability=(9, 0), dtype=torch.bfloat16, width=3)
    assert text.splitlines() == [
        "double with device=cuda, capability=(9, 0), dtype=torch.bfloat16, width=3",
        "  hopper        chosen",
        "  even          no: needs an even width",
        "  reference     can serve",
        "  last          can serve",
    ]
    # A capability list is exact: what runs on sm_90 is not assumed to run on a later chip.
    later = dispatch.explain(op, device="cuda", capability=(10, 0), dtype=torch.bfloat16, width=3)
    assert "no: needs sm_90, the device has capability (10, 0)" in later
    refused = dispatch.explain(op, "hopper", like=CPU, width=2)
    assert "refused: backend 'hopper' of double" in refused
    assert "taken as usual: width=128" in dispatch.explain(op, like=CPU)


def test_explain_needs_a_device_and_a_dtype_at_most() -> None:
    """Its documented call raised ValueError for nine further facts."""
    for family in ("attention", "gdpa", "ikbo", "jagged", "moe", "mxfp8", "tokens"):
        importlib.import_module(f"kernels.{family}")
    assert len(dispatch.operators()) > 30
    for name in dispatch.operators():
        for device in ("cpu", torch.device("cuda", 0)):
            lines = dispatch.explain(name, device=device, dtype=torch.bfloat16).splitlines()
            assert sum(line.endswith(" chosen") for line in lines) == 1, name
        assert dispatch.explain(name).startswith(name)
    text = dispatch.explain("jagged_attention", device="cuda", capability=(9, 0), dtype=torch.bfloat16)
    assert "head_dim=64" in text.splitlines()[1]


def test_a_fact_without_a_usual_value_is_asked_for(op: str) -> None:
    def needs_flavour(*, flavour: str, **facts: object) -> None:
        return None

    dispatch.prefer(op, Backend("flavoured", lambda: None, needs_flavour))
    with pytest.raises(ValueError, match=r"backends of double also need flavour: .*, flavour=\.\.\."):
        dispatch.explain(op, like=CPU)


def test_every_operator_has_a_reference() -> None:
    assert all("reference" in backends for backends in dispatch.operators().values())


def test_a_trace_does_not_look_for_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    def look(name: str) -> None:
        raise AssertionError(f"looked for {name}")

    def step(x: torch.Tensor) -> torch.Tensor:
        return x + 1 if dispatch.needs_triton("cuda", (9, 0)) is None else x

    monkeypatch.setattr(dispatch, "importlib", SimpleNamespace(util=SimpleNamespace(find_spec=look)))
    assert torch.compile(step, backend="eager", fullgraph=True)(torch.ones(1)) == 2


def test_dtypes_are_named_in_a_reason() -> None:
    assert dispatch.needs_dtype(torch.float16, *dispatch.FLOATS) is None
    assert dispatch.needs_dtype(torch.int8, *dispatch.FLOATS) == "takes float16, bfloat16 and float32, not torch.int8"
    assert dispatch.needs_dtype(torch.int8, torch.bfloat16) == "takes bfloat16, not torch.int8"


def test_autocast_operands() -> None:
    single, half, double = (torch.zeros(1, dtype=dtype) for dtype in (torch.float32, torch.float16, torch.float64))
    assert dispatch.autocast_operands(x=single, bias=None) == (single, None)
    with pytest.raises(ValueError, match=r"one dtype, got x torch.float32, y\[1\] torch.float16"):
        dispatch.autocast_operands(x=single, bias=None, **{"y[1]": half})
    with torch.autocast("cpu", torch.bfloat16):
        operands = dispatch.autocast_operands(x=single, y=half)
        assert [x.dtype for x in operands] == [dispatch.autocast_dtype(single)] * 2 == [torch.bfloat16] * 2
        assert dispatch.autocast_operands(x=double) == (double,)


def test_sizes_of_a_symbolic_trace_are_facts_of_their_values() -> None:
    served = []

    def step(x: torch.Tensor) -> torch.Tensor:
        served.append(dispatch.choose("grouped_mm", None, x, in_features=x.shape[1], out_features=8))
        return x + 1

    make_fx(step, tracing_mode="symbolic")(torch.zeros(3, 16))
    assert served == [dispatch.choose("grouped_mm", "reference", torch.zeros(3, 16), in_features=16, out_features=8)]
    with pytest.raises(TypeError, match="unhashable"):
        dispatch.choose("grouped_mm", None, torch.zeros(3, 16), in_features=[16], out_features=8)
