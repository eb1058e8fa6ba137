from __future__ import annotations

import contextlib
import importlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar

import pytest
import torch
from torch.nn import functional

from kernels.attention import jagged_attention as attention
from kernels.bench import Case, Problem, Runner, backends_of, check_equal, check_relative_error, report, timing
from kernels.bench import __main__ as bench
from kernels.bench.__main__ import families, main, run
from kernels.bench.cases import (
    cute_peers,
    gdpa_hstu,
    gdpa_peer,
    ikbo_attention,
    ikbo_lce,
    ikbo_peer,
    jagged_attention,
    mxfp8_grouped,
)
from kernels.bench.cases import gdpa as gdpa_bench
from kernels.bench.timing import interleaved, turn_of
from kernels.core import dispatch
from tools import figure, tables

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """No test asks how long anything takes."""
    monkeypatch.setattr(timing, "WARM_UP_ROUNDS", 1)
    monkeypatch.setattr(timing, "FLUSH_BYTES", {"cpu": 4096})


def doubling(device: torch.device) -> Problem:
    x = torch.randn(64, 64, device=device)

    def unavailable() -> Runner:
        raise dispatch.UnsupportedError("needs a device that is not here")

    return Problem(
        contenders={
            "wrong": lambda: Runner(lambda: 2.001 * x),
            "ours": lambda: Runner(lambda: x + x),
            "peer": lambda: Runner(lambda: [2 * x], tuple),
            "absent": unavailable,
        },
        check=check_relative_error((2 * x,), 1e-6),
        flops=64 * 64,
        bytes=2 * x.nbytes,
    )


def test_wrong_contender_gets_no_speed_and_fails_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = run("doubling", [Case("double", doubling)], CPU, bench.Options(tmp_path, 0.01, 3))
    assert code == 1
    (path,) = tmp_path.glob("*/doubling.json")
    rows = json.loads(path.read_text())["cases"]["double"]["contenders"]
    assert set(rows["wrong"]) == {"wrong"}
    assert "relative error 0.0005, allowed 1e-06" in rows["wrong"]["wrong"]
    assert rows["absent"] == {"unavailable": "needs a device that is not here"}
    assert rows["ours"]["time_over_ours"] == 1.0
    assert rows["peer"]["peak_mib"] is None
    assert rows["peer"]["low_ms"] <= rows["peer"]["median_ms"] <= rows["peer"]["high_ms"]
    assert rows["ours"]["tflops"] == pytest.approx(64 * 64 / rows["ours"]["median_ms"] / 1e9)
    (line,) = (line for line in capsys.readouterr().out.splitlines() if line.startswith("  wrong"))
    assert "ms" not in line
    assert "TFLOP" not in line


def test_a_nan_is_a_wrong_answer() -> None:
    expected = torch.ones(3)
    assert check_relative_error((expected,), 0.1)((torch.tensor([1.0, float("nan"), 1.0]),)) is not None
    assert check_relative_error((expected,), 0.1)((expected + 0.01,)) is None
    assert check_equal((expected,))((expected.clone(),)) is None
    assert check_equal((expected,))((expected * -1,)) == "output 0: 3 of 12 bytes differ"


@pytest.mark.parametrize("fails", [False, True])
def test_a_case_is_captured_as_a_whole_or_not_at_all(
    fails: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Stream:
        wait_stream = synchronize = lambda *arguments: None

    def captured(step: Callable[[], object], stream: Stream, rounds: int) -> Callable[[], object]:
        assert rounds == 4
        if fails and isinstance(step(), list):  # the result of "peer"
            raise RuntimeError("operation not permitted when stream is capturing\nand more lines")
        return step

    captures = []
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)
    monkeypatch.setattr(bench, "graph_rounds", lambda steps, stream: 4)
    monkeypatch.setattr(bench, "captured", captured)
    monkeypatch.setattr(
        bench,
        "interleaved_graphs",
        lambda steps, stream, *arguments: captures.append(list(steps)) or interleaved(steps, *arguments[:-1]),
    )
    run("doubling", [Case("double", doubling)], CPU, bench.Options(tmp_path, 0.01, 3, graph=True))
    (path,) = tmp_path.glob("*/doubling.json")
    case = json.loads(path.read_text())["cases"]["double"]
    assert case["graph"] is not fails
    assert captures == ([] if fails else [["ours", "peer"]])
    assert {name for name, row in case["contenders"].items() if "median_ms" in row} == {"ours", "peer"}
    assert ("peer cannot be captured" in capsys.readouterr().out) is fails
    assert set(case.get("uncaptured", {})) == ({"peer"} if fails else set())


def test_results_of_the_same_environment_are_kept_and_others_dropped(tmp_path: Path) -> None:
    def right(device: torch.device) -> Problem:
        problem = doubling(device)
        return Problem({"ours": problem.contenders["ours"]}, problem.check, problem.flops, problem.bytes)

    def once(name: str) -> dict[str, object]:
        assert run("doubling", [Case(name, right)], CPU, bench.Options(tmp_path, 0.01, 3)) == 0
        return json.loads(path().read_text())

    def path() -> Path:
        (found,) = tmp_path.glob("*/doubling.json")
        return found

    once("first")
    content = once("second")
    assert set(content["cases"]) == {"first", "second"}
    assert set(content["environment"]) == {"device", "python", "torch", "cuda", "driver", "triton", "ptxas"}
    path().write_text(json.dumps(content | {"environment": {"torch": "1.0"}}))
    assert set(once("third")["cases"]) == {"third"}


def test_backends_become_contenders_in_order_of_preference() -> None:
    contenders = backends_of("jagged_attention", lambda name: Runner(lambda: name))
    assert {name: prepare().step() for name, prepare in contenders.items()} == {
        name: name for name in dispatch.operators()["jagged_attention"]
    }


QUICK = ["--device", "cpu", "--seconds", "0", "--min-rounds", "1", "--out"]


def assert_family_was_timed(family: str, out: Path) -> None:
    (path,) = out.glob(f"*/{family}.json")
    cases = json.loads(path.read_text())["cases"]
    assert list(cases) == [case.name for case in importlib.import_module(f"kernels.bench.cases.{family}").cases(CPU)]
    assert all(any("median_ms" in row for row in case["contenders"].values()) for case in cases.values())
    assert all(case["commit"] for case in cases.values())


@pytest.mark.parametrize("family", ["gdpa", "ikbo", "jagged", "moe", "tokens"])
def test_family_on_the_cpu(family: str, tmp_path: Path) -> None:
    assert main([family, *QUICK, str(tmp_path)]) == 0
    assert_family_was_timed(family, tmp_path)


@pytest.mark.parametrize(
    ("peer", "load", "place", "reason"),
    [
        (gdpa_peer, "load_peer", None, "does not name a checkout"),
        (gdpa_peer, "load_peer", "nowhere", "has no folder triton"),
        (gdpa_hstu, "load_peer", None, "does not name a checkout"),
        (gdpa_hstu, "load_peer", "nowhere", "cannot be imported"),
        (ikbo_peer, "load_peer", None, "does not name a checkout"),
        (ikbo_peer, "load_peer", "nowhere", "has no ops/triton_ikbo_lce.py"),
        (ikbo_peer, "load_tlx_attention", "nowhere", "has no ops/tlx_ikbo_fa_ws.py"),
    ],
)
def test_says_why_a_peer_is_missing(
    monkeypatch: pytest.MonkeyPatch, peer: ModuleType, load: str, place: str | None, reason: str
) -> None:
    monkeypatch.delenv(peer.VARIABLE, raising=False)
    if place is not None:
        monkeypatch.setenv(peer.VARIABLE, place)
    (peer._load if hasattr(peer, "_load") else peer.load_peer).cache_clear()
    with pytest.raises(dispatch.UnsupportedError, match=reason):
        getattr(peer, load)()


def test_an_autotuner_tries_the_best_configurations_again() -> None:
    """All of them once for each kind of call, whatever was tried between, then the best of that kind."""

    class Tuner:
        keys: ClassVar[list[str]] = ["Z", "DimQ"]
        configs_timings: ClassVar[dict[int, list[float]]] = {}

        def prune_configs(self, call: dict[str, Any]) -> list[int]:
            return list(range(9))

    tuner = Tuner()
    gdpa_hstu.try_the_best_again(tuner)
    assert tuner.keys == ["Z", "DimQ", "HAS_MULTIPLE_TARGETS", "ENABLE_TMA"]

    def tried(tma: bool, fastest: int) -> list[int]:
        configs = tuner.prune_configs({"DimQ": 64, "HAS_MULTIPLE_TARGETS": True, "ENABLE_TMA": tma})
        tuner.configs_timings = {config: [abs(config - fastest) + config / 100] for config in configs}
        return configs

    assert [tried(False, 2), tried(True, 7)] == [list(range(9))] * 2
    assert (tried(False, 0), tried(True, 0), tried(False, 8)) == ([2, 1, 3, 0], [7, 6, 8, 5], [2, 1, 3, 0])


def test_kernels_in_tlx_need_its_triton(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("triton")
    (tmp_path / "ops").mkdir()
    (tmp_path / "ops" / "tlx_ikbo_lce.py").write_text("import triton.language.extra.tlx as tlx\n")
    monkeypatch.setenv(ikbo_peer.VARIABLE, str(tmp_path))
    ikbo_peer._load.cache_clear()
    with pytest.raises(dispatch.UnsupportedError, match="pip install fbtriton in place of triton"):
        ikbo_peer.load_tlx_compression()


def test_peers_of_requests_and_candidates_are_given_their_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their functions, by the documented meaning of their arguments, on plain PyTorch."""

    def flash(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        lengths = {"max_q": max_seqlen_q, "max_k": max_seqlen_k}
        return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **lengths, backend="reference"), None

    def tlx_attention(q, k, v, owner, rows, length, pairs):
        queries, keys, values = (
            x.unflatten(0, (-1, n)).transpose(1, 2) for x, n in ((q, rows), (k, length), (v, length))
        )
        starts = [i for user in owner.unique() for i in (owner == user).nonzero().flatten().tolist()[::2]]
        assert pairs.tolist() == starts
        out = functional.scaled_dot_product_attention(queries, keys[owner.long()], values[owner.long()])
        return out.transpose(1, 2).flatten(0, 1)

    def tlx_compression(w_candidate, w_request, candidate, request, owner, flags):
        assert flags == "flags"
        return w_candidate @ candidate + (w_request @ request)[owner.long()]

    monkeypatch.setattr(cute_peers, "flash_attention_4", lambda: flash)
    monkeypatch.setattr(ikbo_peer, "load_tlx_attention", lambda: tlx_attention)
    monkeypatch.setattr(ikbo_peer, "load_tlx_compression", lambda: (tlx_compression, lambda *_: "flags"))
    found = Counter[str]()
    for case in [*ikbo_attention.cases(CPU), *ikbo_lce.cases(CPU)]:
        problem = case.problem(CPU)
        for name in ("FlashAttention 4", "FBGEMM TLX"):
            if name in problem.contenders and not (name == "FBGEMM TLX" and "seeds32" in case.name):
                runner = problem.contenders[name]()
                assert problem.check(runner.outputs(runner.step())) is None, (case.name, name)
                found[name] += 1
    assert found == {"FlashAttention 4": 6, "FBGEMM TLX": 3}


def test_installed_peers_say_why_they_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    monkeypatch.setitem(sys.modules, "quack", None)
    with pytest.raises(dispatch.UnsupportedError, match="FlashAttention 4 cannot be imported"):
        cute_peers.where_it_runs(lambda: Runner(cute_peers.flash_attention_4()))
    with pytest.raises(dispatch.UnsupportedError, match="quack cannot be imported"):
        cute_peers.where_it_runs(lambda: Runner(cute_peers.quack_gemm()))


def test_a_peer_that_refuses_a_shape_is_left_out_with_its_reason() -> None:
    def refuses() -> Runner:
        raise AssertionError("head_dim=12 is not supported")

    with pytest.raises(dispatch.UnsupportedError, match="head_dim=12 is not supported"):
        cute_peers.where_it_runs(lambda: Runner(refuses))
    assert cute_peers.where_it_runs(lambda: Runner(lambda: 3)).step() == 3


@pytest.mark.parametrize("masks", [{}, {"causal": True}, {"window": 5}, {"causal": True, "window": 5}])
def test_expected_attention_does_not_depend_on_how_many_rows_are_computed_at_once(
    masks: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    shape = jagged_attention.Shape(7, 16, 0.5, 8, **masks)
    offsets = torch.nn.functional.pad(jagged_attention.lengths_of(7, 16, 0.5, CPU).cumsum(0), (1, 0))
    inputs = [torch.randn(int(offsets[-1]), 4, 8) for _ in range(3)]
    cotangent = torch.randn_like(inputs[0])
    for upstream in (None, cotangent):
        monkeypatch.setattr(jagged_attention, "PAIRS_AT_ONCE", 2**28)
        whole = jagged_attention._expected(inputs, upstream, offsets, shape)
        monkeypatch.setattr(jagged_attention, "PAIRS_AT_ONCE", 2 * 16**2)
        torch.testing.assert_close(jagged_attention._expected(inputs, upstream, offsets, shape), whole)


def test_flash_attention_4_is_given_our_masks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its function, by its documented meaning of the arguments, on the reference: a causal window is (window, 0)."""

    def function(q, k, v, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal, window_size):
        assert cu_seqlens_q.dtype == cu_seqlens_k.dtype == torch.int32
        lengths = {"max_q": max_seqlen_q, "max_k": max_seqlen_k}
        masks = {"causal": causal, "window": window_size}
        return attention(q, k, v, cu_seqlens_q, cu_seqlens_k, **lengths, **masks, backend="reference"), None

    monkeypatch.setattr(cute_peers, "flash_attention_4", lambda: function)
    for shape in jagged_attention.CPU_SHAPES:
        for direction in ("fwd", "bwd"):
            problem = jagged_attention._attention(direction, shape, CPU)
            runner = problem.contenders["FlashAttention 4"]()
            assert problem.check(runner.outputs(runner.step())) is None


def test_quack_is_given_the_groups_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    def gemm(a, b, cu_seqlens_m=None, cu_seqlens_k=None):
        if cu_seqlens_m is not None:
            assert cu_seqlens_m.dtype == torch.int32
            return torch.cat([a[i:j] @ part for (i, j), part in zip(pairwise(cu_seqlens_m.tolist()), b, strict=True)])
        return torch.stack([a[:, i:j] @ b[i:j] for i, j in pairwise(cu_seqlens_k.tolist())])

    monkeypatch.setattr(cute_peers, "quack_gemm", lambda: gemm)
    found = 0
    for case in mxfp8_grouped.cases(CPU):
        problem = case.problem(CPU)
        if "bf16" in case.name:
            runner = problem.contenders["quack bf16"]()
            assert problem.check(runner.outputs(runner.step())) is None
            found += 1
        else:
            assert "quack bf16" not in problem.contenders
            assert ("torch._scaled_grouped_mm fp8" in problem.contenders) == ("wgrad" not in case.name)
    assert found == 6


def test_groups_of_every_layer_that_is_timed_share_its_rows() -> None:
    for rows, _, _, experts in mxfp8_grouped.GPU_LAYERS:
        sizes = mxfp8_grouped._ends(rows, experts, CPU).diff(prepend=torch.zeros(1, dtype=torch.int32))
        assert sizes.sum() == rows
        assert sizes.min() >= 128
        assert not (sizes % 128).any()


def test_several_patterns_choose_cases(tmp_path: Path) -> None:
    chosen = ["attention_fwd_B8_L32_mean0.5_d32_window8", "attention_bwd_B8_L32_mean0.5_d16_causal"]
    assert main(["jagged", "--case", "*fwd*_d32_window8", "*bwd*_d16_causal", *QUICK, str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/jagged.json")
    assert set(json.loads(path.read_text())["cases"]) == set(chosen)


def test_heavy_tailed_lengths_are_mostly_short() -> None:
    lengths = gdpa_bench.heavy_tailed(1152, 2048).double()
    assert lengths.min() >= 1
    assert lengths.max() == 2048
    assert lengths.median() < lengths.mean() < 2048 / 8


def test_mxfp8_family_alone_too(tmp_path: Path) -> None:
    assert main(["mxfp8", "--alone", *QUICK, str(tmp_path)]) == 0
    assert_family_was_timed("mxfp8", tmp_path)
    (path,) = tmp_path.glob("*/mxfp8.json")
    results = json.loads(path.read_text())
    rows = [row for case in results["cases"].values() for row in case["contenders"].values() if "median_ms" in row]
    assert all(row["alone_ms"] > 0 for row in rows)
    assert "x (alone " in report.page(results, str(path))


def test_unknown_names_list_the_known_ones(capsys: pytest.CaptureFixture[str]) -> None:
    assert families() == ["gdpa", "ikbo", "jagged", "moe", "mxfp8", "tokens"]
    with pytest.raises(SystemExit):
        main(["jaged"])
    assert "jagged" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["jagged", "--case", "nothing*", "--device", "cpu"])
    assert "attention_fwd_B4_L32_mean1.0" in capsys.readouterr().err


def test_report_and_figure_of_results(tmp_path: Path) -> None:
    assert main(["jagged", "--case", "*L16", *QUICK, str(tmp_path)]) == 0
    (path,) = tmp_path.glob("*/jagged.json")
    results = json.loads(path.read_text())
    lines = report.page(results, "results.json").splitlines()
    assert [line.split(" ")[1] for line in lines if line.startswith("| sweep")] == ["sweep_fwd_L16", "sweep_train_L16"]
    dense = results["cases"]["sweep_fwd_L16"]["contenders"]["dense"]
    assert any(f"{dense['time_over_ours']:.2f}x" in line for line in lines)
    assert figure.series(results)["fwd", "median_ms"]["dense"] == {16: dense["median_ms"]}
    for contender in results["cases"]["sweep_fwd_L16"]["contenders"].values():
        contender["peak_mib"] = 1.0
    assert figure.series(results)["fwd", "mib"]["dense"] == {16: 1.0 + dense["input_mib"]}
    figure.draw(results).savefig(tmp_path / "figure.png")


def test_committed_pages_are_made_from_the_committed_results() -> None:
    root = Path(report.__file__).parents[2]
    pages = {path.name: path.read_text() for path in (root / "docs" / "benchmarks").glob("*.md")}
    assert pages
    for results in (root / "kernels" / "bench" / "results").glob("*/*.json"):
        name = f"{results.stem}-{results.parent.name.removeprefix('nvidia-')}.md"
        source = results.relative_to(root).as_posix()
        assert pages.pop(name) == report.page(json.loads(results.read_text()), source)
    assert not pages


@pytest.mark.parametrize("page", tables.PAGES)
def test_tables_of_documents_are_made_from_the_committed_results(page: str) -> None:
    text = (tables.ROOT / page).read_text()
    assert tables.rewritten(text, tables.PAGES[page]()) == text


def test_the_readme_names_the_strongest_of_all_contenders_of_one_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for contest in tables.CONTESTS:
        times = {name: row["median_ms"] for name, row in contest.result.rows.items()}
        others = set(times) - tables.OWN - {contest.ours}
        alike = {name for name in others if ("fp8" in name) == ("fp8" in contest.ours)}
        assert contest.rivals == sorted(alike, key=lambda name: times[name])
        known = {name for names in tables.KNOWN.values() for name in names}
        assert {name for name in others if contest.named(name) == name} <= known, "a contender without a name for pages"

    def row(ms: float) -> dict[str, float]:
        return {"median_ms": ms, "tflops": 1.0}

    contenders = {"hopper": row(2.0), "torch": row(6.0), "triton": row(1.0), "FlashAttention 4": row(3.0)}
    case = "attention_fwd_made_up"
    contest = tables.Contest("made up", "jagged", case, "hopper")
    monkeypatch.setattr(tables, "_cases", lambda family: {case: {"contenders": contenders}})
    monkeypatch.setattr(tables, "CONTESTS", (contest,))
    ((_, cells),) = tables.readme()
    assert cells[1:] == ["1.50x FlashAttention 4", "3.00x `torch.nn.attention.varlen`"]
    del contenders["FlashAttention 4"]
    ((_, cells),) = tables.readme()
    assert cells[1:] == ["3.00x `torch.nn.attention.varlen`; FlashAttention 4 did not run", ""]
    contenders["FlashAttention 4"] = {"unavailable": "FlashAttention 4 cannot be imported"}
    assert contest.result.over("FlashAttention 4") == "not run"
    contenders["FlashAttention 4"] = {"unavailable": "cannot run this: head_dim"}
    assert contest.result.over("FlashAttention 4") == "cannot"


def test_a_row_that_a_page_has_not_once_is_an_error() -> None:
    page = "| case | ms |\n|---|---|\n| a | 1 |\n| a, b | 2 |\n"
    assert tables.rewritten(page, iter([("a", ["3"])])) == page.replace("| a | 1 |", "| a | 3 |")
    for first, there in (("c", page), ("a", 2 * page)):
        with pytest.raises(ValueError, match=f"rows begin with the cell '{first}'"):
            tables.rewritten(there, iter([(first, ["3"])]))


def test_processes_of_one_folder_take_turns(tmp_path: Path) -> None:
    with turn_of(tmp_path):
        script = "import fcntl, os, sys; fcntl.flock(os.open(sys.argv[1], os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)"
        assert subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True).returncode == 1
    assert subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True).returncode == 0
