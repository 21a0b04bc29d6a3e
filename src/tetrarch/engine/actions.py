# SPDX-License-Identifier: Apache-2.0
"""What a trainer or an operator asks of a running engine: one message for each action.

The engine reads a message between two steps, and so every action finds the scheduler at rest.
Each is answered by one `ControlReply` that repeats its ticket, and none ends the engine: a
refusal is an answer, too.
"""

from __future__ import annotations

from typing import Literal

import msgspec

__all__ = [
    "Action",
    "BeginUpdate",
    "CheckWeights",
    "Continue",
    "DestroyGroup",
    "EndUpdate",
    "GetWeights",
    "InitGroup",
    "Pause",
    "PauseMode",
    "PostProcess",
    "Release",
    "Resume",
    "Selector",
    "SetVersion",
    "UpdateFromDisk",
    "UpdateFromDistributed",
    "UpdateFromTensors",
    "WeightCheck",
]

# Whose weights: of the model that answers, of the one that drafts for it, or both.
Selector = Literal["all", "target", "draft"]
PauseMode = Literal["abort", "retract", "in_place"]
WeightCheck = Literal["checksum", "snapshot", "compare", "reset_tensors"]


class Pause(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Run no step until `Continue`; requests that arrive meanwhile wait.

    Attributes:
        mode: What becomes of requests: `abort` ends all, `retract` sets the running ones back to
            wait with the tokens they have, `in_place` leaves their keys and values where they are.
    """

    ticket: int
    mode: PauseMode = "abort"


class Continue(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Step again. Ends an update by tensors that nobody began explicitly."""

    ticket: int


class SetVersion(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Name the weights; the payload is `{"new_version": version}`."""

    ticket: int
    version: str
    abort_all_requests: bool = True


class UpdateFromDisk(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Replace all weights by those of a folder.

    The payload of a success, and of a refusal as far as it is known: `num_paused_requests`,
    `atomic`, `weight_version`, `model_path`, `source`, `seconds`, `num_tensors`, `num_bytes`,
    `warnings`.

    Attributes:
        weight_version: `None` counts updates: "1", "2", …
        flush_cache: Compute what running requests have again under the new weights, and empty the
            prefix cache; else they keep keys and values of the old ones.
        keep_pause: Stay paused afterwards, even if nobody had paused before.
        atomic: Demand an undo copy, or renounce it; `None`: where host memory has room.
        dry_run: Check only.
    """

    ticket: int
    path: str
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    keep_pause: bool = False
    atomic: bool | None = None
    dry_run: bool = False


class BeginUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Begin an update by tensors that only `EndUpdate` ends; no step runs until then.

    The payload is `{"atomic": whether a failure can be undone}`. Refused where one is open.

    Attributes:
        selector: Whose tensors are taken; others that the calls bring are left out.
    """

    ticket: int
    atomic: bool | None = None
    selector: Selector = "all"


class EndUpdate(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """End an update by tensors; refused where none is open. Payload as of `UpdateFromDisk`."""

    ticket: int


class PostProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """What older trainers send for `BeginUpdate` and `EndUpdate`; may be repeated.

    Attributes:
        begins: Begin an update, unless one is open.
        ends: End the one that is open, if any.
    """

    ticket: int
    begins: bool = False
    ends: bool = False


class UpdateFromTensors(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take tensors; what is whole is written, the rest waits for later calls.

    Where no update is open, this call opens one. Unless `BeginUpdate` did, the update ends with
    the first call that sets `flush_cache`, or with `Flush`, `Continue`, `EndUpdate`, `PostProcess`,
    or a request that arrives while the engine is not paused. Payload: as of `UpdateFromDisk`, and
    `is_open`, `unfinished` (what is still half-complete, in words).

    Attributes:
        data: One rank's pickle, its base64 taken off.
        load_format: `None`, `"direct"` or `"flattened_bucket"`.
        weight_version: The last one that an update's calls name is taken.
        selector: Whose tensors of this call are taken.
    """

    ticket: int
    data: bytes
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Selector = "all"


class InitGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Join a process group in which a trainer, its rank 0, broadcasts tensors."""

    ticket: int
    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = "weight_update_group"
    backend: str = "nccl"


class DestroyGroup(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Leave a process group; one that is being joined, too, whose `InitGroup` is refused then."""

    ticket: int
    group_name: str = "weight_update_group"


class UpdateFromDistributed(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Receive tensors from a process group, then as `UpdateFromTensors`.

    Attributes:
        names, dtypes, shapes: Of the tensors, in the order in which they are broadcast; dtypes as
            torch spells them, without `torch.`.
        load_format: `None`, or `"flattened_bucket"`: they come as one flat tensor.
    """

    ticket: int
    names: tuple[str, ...]
    dtypes: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    group_name: str = "weight_update_group"
    load_format: str | None = None
    weight_version: str | None = None
    flush_cache: bool = True
    abort_all_requests: bool = False
    selector: Selector = "all"


class GetWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Read a weight by its checkpoint name; the payload is `{"values": nested list}`.

    Attributes:
        truncate_size: How many of its rows.
    """

    ticket: int
    name: str
    truncate_size: int = 100


class CheckWeights(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Compare weights without moving them.

    Attributes:
        action: `checksum`: the payload is `checksum` and `checksums`, by tensor. `snapshot`
            remembers them, `compare` fails where they differ from that. `reset_tensors` writes
            noise: only a full update makes the weights usable again.
        skip: Names that `compare` leaves out.
        selector: Whose weights are told and compared; `snapshot` and `reset_tensors` take all.
    """

    ticket: int
    action: WeightCheck
    skip: tuple[str, ...] = ()
    selector: Selector = "all"


class Release(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Give memory back to the system.

    Requests that live are in the way, except waiting ones while the engine is paused. The payload:
    `released` (tags that this call moved), `already`, `num_bytes` and `state` by tag.

    Attributes:
        tags: Of `weights`, `kv_cache`, `cuda_graph`; none means all.
        wait_s: How long to wait until no request is in the way.
        backup: Whether the weights are kept, so that `Resume` alone brings them back; `None`: as
            the server was started.
    """

    ticket: int
    tags: tuple[str, ...] = ()
    wait_s: float = 0.0
    backup: bool | None = None


class Resume(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Take memory again. Payload as of `Release`, with `resumed`."""

    ticket: int
    tags: tuple[str, ...] = ()


Action = (
    Pause
    | Continue
    | SetVersion
    | UpdateFromDisk
    | BeginUpdate
    | EndUpdate
    | PostProcess
    | UpdateFromTensors
    | InitGroup
    | DestroyGroup
    | UpdateFromDistributed
    | GetWeights
    | CheckWeights
    | Release
    | Resume
)
