# SPDX-License-Identifier: Apache-2.0
"""The settings that say how much runs at once."""

from __future__ import annotations

from tetrarch.config.args_engine import EngineArgs
from tetrarch.config.spellings import FLAGS


def test_defaults_that_clients_of_other_engines_expect() -> None:
    args = EngineArgs()
    assert args.max_prefill_tokens == 16384
    assert args.prefix_cache
    assert (args.tp_size, args.dp_size) == (1, 1)


def test_sglangs_names_of_speculation_mean_the_models_own_layers() -> None:
    algorithm = FLAGS["--speculative-algorithm"].field
    assert {algorithm.parse(word, spelling="x") for word in ("EAGLE", "NEXTN", "MTP", "mtp")} == {
        "mtp"
    }


def test_switches_that_only_turn_off_carry_their_value() -> None:
    assert FLAGS["--disable-radix-cache"].means == "off"
    assert FLAGS["--disable-cuda-graph"].means == "off"
    assert FLAGS["--disable-piecewise-cuda-graph"].means == "0"


def test_the_compiler_is_switched_by_either_word() -> None:
    assert FLAGS["--enable-torch-compile"].means == "on"
    assert FLAGS["--disable-torch-compile"].means == "off"
