# SPDX-License-Identifier: Apache-2.0
"""The command line and the environment, read strictly and once."""

from __future__ import annotations

import logging

import pytest

from tetrarch.config.args import GROUPS, LaunchArgs
from tetrarch.config.cli import (
    LaunchParser,
    add_launch_arguments,
    from_keywords,
    parse_args,
    read_command_line,
    read_keywords,
)
from tetrarch.config.spellings import FLAGS, VARIABLES, Spelling
from tetrarch.core.errors import LaunchErrors
from tetrarch.core.knob import KnobField, knobs


def refused(*argv: str, **environ: str) -> list[str]:
    with pytest.raises(LaunchErrors) as caught:
        parse_args(argv, environ)
    return [str(error) for error in caught.value.errors]


def test_nothing_said_is_nothing_changed() -> None:
    assert parse_args([], {}) == LaunchArgs()
    assert from_keywords(environ={}) == LaunchArgs()


def test_flags_variables_and_keywords_say_the_same() -> None:
    wanted = LaunchArgs(model="a/b", page_size=32, prefix_cache=False, fused_finalize=True)
    flags = ["a/b", "--page-size", "32", "--no-prefix-cache", "--fused-finalize"]
    variables = {
        "TETRARCH_MODEL": "a/b",
        "TETRARCH_PAGE_SIZE": "32",
        "TETRARCH_PREFIX_CACHE": "off",
        "TETRARCH_FUSED_FINALIZE": "true",
    }
    keywords = {"model": "a/b", "page_size": 32, "prefix_cache": False, "fused_finalize": True}
    assert parse_args(flags, {}) == wanted
    assert parse_args([], variables) == wanted
    assert from_keywords(environ={}, **keywords) == wanted


def test_flags_take_their_value_after_an_equals_sign_too() -> None:
    assert parse_args(["--page-size=64", "--chunked-prefill-size=-1"], {}) == LaunchArgs(
        page_size=64, chunked_prefill_size=-1
    )


def test_a_negative_number_is_a_value() -> None:
    assert parse_args(["--chunked-prefill-size", "-1"], {}).chunked_prefill_size == -1


def test_sglangs_command_line_is_understood() -> None:
    argv = (
        "--model-path m --moe-runner-backend triton --moe-a2a-backend none --tp 1 "
        "--mem-fraction-static 0.8 --disable-radix-cache --disable-cuda-graph "
        "--enable-mixed-chunk --served-model-name x --enable-metrics"
    )
    environ = {
        "SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION": "1",
        "SGLANG_FP4_IGNORED_LAYERS": "shared_expert,model.layers.40",
        "FLASHINFER_NVFP4_4OVER6": "1",
        "FLASHINFER_NVFP4_4OVER6_ERR_MODE": "MSE",
        "FLASHINFER_NVFP4_4OVER6_E4M3_USE_256": "1",
    }
    assert parse_args(argv.split(), environ) == LaunchArgs(
        model="m",
        moe_runner="triton",
        moe_dispatch="all_gather",
        kv_cache_fraction=0.8,
        prefix_cache=False,
        cuda_graphs="off",
        served_model_name="x",
        moe_activations="per_token",
        fp4_ignored_layers=("shared_expert", "model.layers.40"),
        four_over_six=True,
        four_over_six_error="mse",
        four_over_six_e4m3_max="256",
    )


def test_per_token_and_w4a16_variables_cannot_both_be_on() -> None:
    (error,) = refused(
        SGLANG_FLASHINFER_NVFP4_PER_TOKEN_ACTIVATION="1", SGLANG_FLASHINFER_CUTEDSL_NVFP4_W4A16="1"
    )
    assert "disagree" in error
    assert "moe_activations" in error


def test_a_wire_and_its_variable_that_disagree_are_refused() -> None:
    """A row of the upstream start-up matrix: dispatch type by flag and by variable."""
    (error,) = refused("--moe-wire", "bf16", SGLANG_MOE_NVFP4_DISPATCH="1")
    assert "disagree" in error


def test_an_unknown_variable_of_ours_is_an_error_with_the_nearest_name() -> None:
    (error,) = refused(TETRARCH_FUSED_FINALISE="1")
    assert "unknown variable 'TETRARCH_FUSED_FINALISE'" in error
    assert "did you mean TETRARCH_FUSED_FINALIZE?" in error


def test_a_malformed_variable_is_an_error() -> None:
    (error,) = refused(TETRARCH_FUSED_FINALIZE="maybe")
    assert "TETRARCH_FUSED_FINALIZE: 'maybe' is not a boolean" in error


def test_drafting_is_switched_off_by_a_word_in_any_spelling() -> None:
    off = parse_args([], {"TETRARCH_SPECULATIVE_ALGORITHM": "none"})
    assert off.speculative_algorithm == "none"
    assert parse_args(["--speculative-algorithm", "NextN"], {}).speculative_algorithm == "mtp"
    (error,) = refused(TETRARCH_SPECULATIVE_ALGORITHM="medusa")
    assert "one of mtp, none (also EAGLE = mtp, NEXTN = mtp)" in error


def test_an_unknown_variable_of_sglang_is_one_log_line(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("tetrarch"), "propagate", True)
    with caplog.at_level("WARNING", logger="tetrarch"):
        parse_args([], {"SGLANG_B": "1", "SGLANG_A": "1", "SGLANG_FP4_IGNORED_LAYERS": "x"})
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("SGLANG_A, SGLANG_B")


def test_an_unknown_flag_is_an_error_with_the_nearest_name() -> None:
    (error,) = refused("--chunk-prefill-size", "512")
    assert "unknown argument '--chunk-prefill-size'" in error
    assert "did you mean --chunked-prefill-size?" in error


def test_what_follows_an_unknown_flag_is_not_taken_for_the_model() -> None:
    parser = LaunchParser()
    add_launch_arguments(parser)
    reading = read_command_line(parser, ["--chunk-size", "512", "--page-size", "x"], {})
    assert reading.args.model is None
    assert len(reading.errors) == 2
    assert read_command_line(parser, ["m", "--chunk-size", "512"], {}).args.model == "m"


def test_flags_are_not_abbreviated() -> None:
    (error,) = refused("--quant", "none")
    assert "did you mean --quantization?" in error


def test_one_model_is_all_it_takes() -> None:
    (error,) = refused("a", "b")
    assert "unknown argument 'b'" in error


def test_model_said_twice_must_agree() -> None:
    (error,) = refused("a", "--model-path", "b")
    assert "disagree" in error


def test_a_flag_without_its_value_is_an_error() -> None:
    (error,) = refused("--page-size")
    assert "expected one argument" in error


def test_a_context_in_which_no_prompt_leaves_room_for_a_token_is_refused() -> None:
    (error,) = refused("--context-length", "1")
    assert "at least 2" in error


def test_everything_wrong_is_reported_together() -> None:
    errors = refused(
        "--port",
        "99999",
        "--page-size",
        "x",
        "--frobnicate",
        TETRARCH_THREDS="1",
        TETRARCH_DTYPE="q",
    )
    text = "\n".join(errors)
    for part in ("99999", "'x'", "--frobnicate", "TETRARCH_THREADS", "'q'"):
        assert part in text
    assert len(errors) == 5


def test_an_unknown_keyword_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(LaunchErrors) as caught:
        from_keywords(environ={}, page_sise=16, port="80")
    unknown, malformed = caught.value.errors
    assert unknown.fix == "did you mean page_size?"
    assert "port: '80'" in malformed.what


def two_values(field: KnobField) -> tuple[str, str]:
    """Two texts that a setting understands, and that mean different things."""
    if field.knob.choices:
        words = (*field.knob.choices, *field.knob.refused)
        return words[0], (*words, "auto")[1]
    if field.kind in (int, float):
        low, high = field.knob.at_least or 0, field.knob.at_most
        first = f"{low:g}"
        return first, "auto" if high == low else f"{low + 1 if high is None else high:g}"
    return ("on", "off") if field.kind is bool else ("some", "other")


PAIRS = [
    (flag, variable)
    for flag in FLAGS.values()
    for variable in VARIABLES.values()
    if flag.field is variable.field
]


def contradiction(flag: Spelling, variable: Spelling) -> tuple[list[str], dict[str, str]]:
    """Return a command line and an environment that set one setting to two values."""
    values = two_values(flag.field)
    said = flag.means or (values[0] if flag.field.kind is not bool else "on")
    text = next(each for each in values if each != said)
    if variable.means is not None:  # a switch: it stands for one value, so the flag takes another
        said, text = next(each for each in values if each != variable.means), "1"
    takes_none = flag.means is not None or flag.field.kind is bool
    return [flag.name] if takes_none else [f"{flag.name}={said}"], {variable.name: text}


@pytest.mark.parametrize(
    ("flag", "variable"), PAIRS, ids=[f"{flag.name} {other.name}" for flag, other in PAIRS]
)
def test_a_flag_and_a_variable_that_disagree_are_refused_whatever_they_set(
    flag: Spelling, variable: Spelling
) -> None:
    argv, environ = contradiction(flag, variable)
    (error,) = refused(*argv, **environ)
    assert flag.name in error
    assert variable.name in error
    assert f"both set {flag.field.name}" in error


def test_every_setting_is_contradicted() -> None:
    own = {(flag.name, variable.name) for flag, variable in PAIRS}
    assert {(field.flag, field.env) for field in knobs(LaunchArgs)} <= own


@pytest.mark.parametrize("field", knobs(LaunchArgs), ids=lambda field: field.name)
def test_a_flag_and_a_variable_that_agree_are_fine(field: KnobField) -> None:
    """Negative control: it is the values that disagree, not the spellings."""
    for text in two_values(field):
        name = field.flag.replace("--", "--no-") if text == "off" else field.flag
        is_switch = field.kind is bool
        args = parse_args([name] if is_switch else [f"{name}={text}"], {field.env: text})
        assert vars(args)[field.name] == field.parse(text, spelling=field.flag)


def test_keywords_must_agree_with_the_environment() -> None:
    with pytest.raises(LaunchErrors, match="TETRARCH_PORT=2"):
        from_keywords(environ={"TETRARCH_PORT": "2"}, port=1)


def test_the_process_environment_is_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TETRARCH_PORT", "1234")
    assert parse_args([]).port == 1234
    assert from_keywords().port == 1234


def test_a_sound_setting_survives_a_wrong_one() -> None:
    reading = read_keywords({"port": "x", "page_size": 32}, {})
    assert (reading.args.port, reading.args.page_size) == (30000, 32)
    assert len(reading.errors) == 1


def test_a_commands_own_arguments_come_back_beside_the_settings() -> None:
    parser = LaunchParser()
    add_launch_arguments(parser)
    parser.add_argument("--limit", type=int)
    reading = read_command_line(parser, ["m", "--limit", "5", "--page-size", "64"], {})
    assert reading.namespace.limit == 5
    assert reading.args == LaunchArgs(model="m", page_size=64)


def test_help_has_every_heading_and_setting() -> None:
    parser = LaunchParser(prog="tetrarch serve")
    add_launch_arguments(parser)
    text = parser.format_help()
    for group in GROUPS:
        assert f"\n{group}:\n" in text
    assert "Per token: every token gets a" in text
    assert "--moe-runner-backend" in "".join(text.split())  # lines break at hyphens
    assert "hush" not in text
