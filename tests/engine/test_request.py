# SPDX-License-Identifier: Apache-2.0
"""A request for several outputs becomes several requests."""

from __future__ import annotations

from tetrarch.engine.request import GenerateRequest, SamplingParams, fan_out


def request(**sampling: object) -> GenerateRequest:
    return GenerateRequest(rid="r", prompt_ids=(1,), sampling=SamplingParams(**sampling))  # type: ignore


def test_one_output_needs_no_fan() -> None:
    assert fan_out(request()) == (request(),)


def test_every_output_has_its_own_id_and_seed() -> None:
    parts = fan_out(request(n=3, sampling_seed=7, temperature=0.5))
    assert [part.rid for part in parts] == ["r_0", "r_1", "r_2"]
    assert [part.sampling.sampling_seed for part in parts] == [7, 8, 9]
    assert {(part.sampling.n, part.sampling.temperature) for part in parts} == {(1, 0.5)}


def test_seeds_stay_within_64_bits_and_none_stays_none() -> None:
    parts = fan_out(request(n=2, sampling_seed=2**63 - 1))
    assert [part.sampling.sampling_seed for part in parts] == [2**63 - 1, -(2**63)]
    assert all(part.sampling.sampling_seed is None for part in fan_out(request(n=2)))
