# SPDX-License-Identifier: Apache-2.0
"""What is made of the names that were said."""

from __future__ import annotations

from tetrarch.config.spellings import FLAGS, KEYWORDS, VARIABLES, Sayings, nearest


def said(**environ: str) -> Sayings:
    sayings = Sayings()
    sayings.environment(environ)
    return sayings


def test_every_setting_has_three_spellings_of_its_own() -> None:
    assert VARIABLES["TETRARCH_PAGE_SIZE"].field is FLAGS["--page-size"].field
    assert KEYWORDS["page_size"].field is FLAGS["--page-size"].field


def test_keywords_include_other_engines_names() -> None:
    sayings = Sayings()
    sayings.keyword("mem_fraction_static", 0.5)
    sayings.keyword("disable_radix_cache", True)
    sayings.keyword("moe_a2a_backend", "none")
    args = sayings.settle()
    assert (args.kv_cache_fraction, args.prefix_cache) == (0.5, False)
    assert args.moe_dispatch == "all_gather"
    assert not sayings.errors


def test_sglangs_switches_stand_for_activations_and_a_wire() -> None:
    for name, field, value in (
        ("SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION", "moe_activations", "per_token"),
        ("SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16", "moe_activations", "bf16"),
        ("SGLANG_MOE_NVFP4_DISPATCH", "moe_wire", "nvfp4"),
    ):
        sayings = said(**{name: "true"})
        assert vars(sayings.settle())[field] == value
        assert not sayings.errors


def test_a_switch_that_is_off_says_nothing() -> None:
    sayings = said(SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16="0")
    sayings.keyword("disable_radix_cache", False)
    args = sayings.settle()
    assert (args.moe_activations, args.prefix_cache) == ("auto", True)
    assert not sayings.errors


def test_a_switch_is_a_boolean() -> None:
    sayings = said(SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16="bf16")
    assert "SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16: 'bf16'" in sayings.errors[0].what


def test_an_empty_variable_says_nothing() -> None:
    sayings = said(TETRARCH_PORT="", SGLANG_MOE_NVFP4_DISPATCH="")
    assert sayings.settle().port == 30000
    assert not sayings.errors


def test_spellings_that_agree_are_fine() -> None:
    sayings = said(TETRARCH_THREADS="3", OMP_NUM_THREADS="3")
    sayings.flag(FLAGS["--threads"], "3")
    assert sayings.settle().threads == 3
    assert not sayings.errors


def test_spellings_that_disagree_name_each_other() -> None:
    sayings = said(OMP_NUM_THREADS="1")
    sayings.flag(FLAGS["--threads"], "3")
    sayings.settle()
    (error,) = sayings.errors
    assert error.what == "OMP_NUM_THREADS=1 and --threads=3 disagree"


def test_a_disagreement_about_a_secret_does_not_print_it() -> None:
    sayings = said(TETRARCH_API_KEY="sesame")
    sayings.keyword("api_key", "simsim")
    sayings.settle()
    assert "sesame" not in str(sayings.errors[0])
    assert "simsim" not in str(sayings.errors[0])


def test_a_wrong_name_is_answered_with_the_nearest() -> None:
    assert nearest("--chunk-prefill-size", FLAGS) == "did you mean --chunked-prefill-size?"
    assert nearest("TETRARCH_QQ", VARIABLES) == "`tetrarch serve --help` lists them"
    assert nearest("--zzzzzz", FLAGS) == "`tetrarch serve --help` lists them"
