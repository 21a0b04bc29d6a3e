# SPDX-License-Identifier: Apache-2.0
"""The settings that say what is computed."""

from __future__ import annotations

from tetrarch.config.args import LaunchArgs
from tetrarch.config.args_model import ModelArgs
from tetrarch.config.support import SUPPORT
from tetrarch.core.knob import KnobField, knobs
from tetrarch.numerics.contract import Activations, Quantization


def knob(name: str) -> KnobField:
    (found,) = [field for field in knobs(LaunchArgs) if field.name == name]
    return found


def test_choices_are_the_contracts_words() -> None:
    assert knob("quantization").knob.choices == ("auto", *Quantization)
    assert knob("moe_activations").knob.choices == ("auto", *Activations)


def test_choices_are_the_tables_words_and_refused_ones_are_understood() -> None:
    runner = knob("moe_runner")
    assert set(runner.knob.choices) == {"auto", *(row.runner for row in SUPPORT)}
    assert runner.parse("marlin", spelling="x") == "marlin"


def test_sglangs_words_for_dispatch_are_translated() -> None:
    dispatch = knob("moe_dispatch")
    assert dispatch.parse("none", spelling="x") == "all_gather"
    assert dispatch.parse("flashinfer", spelling="x") == "all_to_all"
    assert dispatch.parse("deepep", spelling="x") == "deepep"


def test_quantization_says_in_plain_words_what_per_token_and_per_tensor_mean() -> None:
    text = knob("quantization").knob.help
    assert "Per token: every token gets a scale of its own" in text
    assert "Per tensor: all tokens share one scale" in text


def test_nothing_is_quantized_or_fused_unless_asked() -> None:
    args = ModelArgs()
    assert (args.quantization, args.moe_activations) == ("auto", "auto")
    assert not any((args.four_over_six, args.fused_finalize, args.deterministic))
