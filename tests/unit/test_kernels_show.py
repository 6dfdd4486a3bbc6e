"""The command prints a plan on 80 columns, plainly where it is piped."""

import io

import pytest
from rich.console import Console

from ratrain_jax.kernels import Gemm, cost_gemm, load_machine
from ratrain_jax.kernels.__main__ import main
from ratrain_jax.kernels.gemm_plan import plan_for
from ratrain_jax.kernels.show import buffer_parts, show_gemm
from ratrain_jax.kernels.tiles import buffer_bytes

MT3000 = load_machine("mt3000")


@pytest.mark.parametrize(
    "arguments",
    [
        ["2048", "4096", "4096"],
        ["1", "1", "1"],
        ["2048", "32000", "4096", "--form", "nt", "--accumulator", "promote"],
        ["100000", "100000", "100000", "--accumulator", "fp32"],
        ["512", "512", "512", "--machine", "ft-m7032", "--dtype", "float64"],
    ],
)
def test_it_fits_80_columns_and_is_plain_when_piped(arguments: list[str], capsys) -> None:
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert max(len(line) for line in printed.splitlines()) <= 80
    assert "\x1b" not in printed and "█" not in printed
    for word in ("m_g", "GSM", "AM", "SM", "DDR", "bytes", "roofline", "assumed"):
        assert word in printed


def test_it_says_what_the_cost_model_says(capsys) -> None:
    main(["2048", "4096", "4096", "--accumulator", "promote"])
    gemm = Gemm(2048, 4096, 4096, accumulator="promote")
    cost = cost_gemm(gemm, MT3000)
    printed = capsys.readouterr().out
    assert f"{cost.efficiency:.1%} of the peak" in printed
    assert f"{cost.seconds * 1e3:.3f} ms" in printed
    assert f"m_g  {plan_for(gemm, MT3000).m_g}" in printed


def test_a_terminal_gets_the_picture_in_blocks() -> None:
    gemm = Gemm(64, 64, 64)
    out = io.StringIO()
    show_gemm(gemm, MT3000, plan_for(gemm, MT3000), Console(file=out, force_terminal=True))
    assert "█" in out.getvalue() and "\x1b[1m" in out.getvalue()


@pytest.mark.parametrize("form", ["nn", "nt"])
def test_the_picture_shows_all_buffers(form: str) -> None:
    gemm = Gemm(2048, 4096, 4096, form=form, accumulator="promote")
    plan = plan_for(gemm, MT3000)
    for name, held in buffer_parts(gemm, plan).items():
        assert sum(count for _, count in held) == buffer_bytes(plan, gemm)[name]


def test_errors_go_to_stderr_with_a_code(capsys) -> None:
    assert main(["8", "8", "8", "--machine", "generic"]) == 2
    captured = capsys.readouterr()
    assert "no accelerator" in captured.err and not captured.out
    assert main(["0", "8", "8"]) == 2
