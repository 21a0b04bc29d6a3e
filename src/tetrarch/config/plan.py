# SPDX-License-Identifier: Apache-2.0
"""The plan: everything decided, nothing left on `auto`. Built once, frozen, handed down in parts.

`resolve` makes it, constructors read it, child processes receive it pickled.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from itertools import takewhile

from tetrarch.config.drafts import DRAFT
from tetrarch.config.hardware import Device
from tetrarch.config.patterns import matches
from tetrarch.config.support import Finalize, Route
from tetrarch.core.errors import CapacityExceeded
from tetrarch.numerics.contract import QuantContract, Recipe, SourceFormat

__all__ = [
    "Decision",
    "ExpertPlan",
    "GraphPlan",
    "MemoryPlan",
    "ModelFacts",
    "ModelPlan",
    "ParallelPlan",
    "Plan",
    "QuantPlan",
    "SchedulePlan",
    "ServePlan",
    "SpecPlan",
    "TokenBudget",
]


@dataclass(frozen=True, slots=True)
class Decision:
    """One thing `resolve` settled, and why. `field` is a setting's name where there is one."""

    field: str
    value: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What the model is, counted on `meta` without reading a weight (models/describe.py)."""

    model_type: str
    architectures: tuple[str, ...]
    num_layers: int
    num_moe_layers: int
    num_experts: int
    top_k: int
    hidden_size: int
    expert_hidden_size: int  # differs from hidden_size for latent experts
    expert_intermediate_size: int
    vocab_size: int
    context_len: int  # from the config
    num_dense_params: int
    num_expert_params: int
    kv_elements_per_token: int  # all layers, keys and values together
    num_mtp_layers: int
    num_draft_dense_params: int = 0  # of a draft, which is one layer and what joins it
    num_draft_expert_params: int = 0
    draft_kv_elements_per_token: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelPlan:
    """Which checkpoint, and how it is named and typed."""

    path: str  # a local folder
    tokenizer_path: str | None  # None: prompts and outputs are token ids
    served_name: str
    dtype: str  # "bfloat16" | "float16" | "float32": hidden states and dense weights
    context_len: int
    facts: ModelFacts
    load_format: str = "safetensors"  # or "dummy": random numbers


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantPlan:
    """The contract of the experts, with everything the numbers depend on.

    A draft inherits it once, when it is resolved; only where its weights are stored otherwise, or
    an operator's pattern exempts them, has it a contract of its own, of the same activations.
    """

    contract: QuantContract
    source: SourceFormat
    ignored_layers: tuple[str, ...]  # patterns (config/patterns.py) of layers left unquantized
    weight_recipe: Recipe  # 4-over-6 of online weights
    activation_recipe: Recipe | None  # 4-over-6 of activations; None: plain exact mode
    fc2_input_scale: float  # per-token factor of the second GEMM's input: 1/2688, or 1.0
    draft: QuantContract | None = None  # of the draft's experts; None: as any layer's

    def at(self, layer: str) -> QuantPlan:
        """Return what holds for the expert layer at this HF path."""
        if self.draft is None or not layer.startswith(DRAFT):
            return self
        return replace(self, contract=self.draft, ignored_layers=(), draft=None)

    def ignores(self, layer: str) -> bool:
        """Whether the expert layer at this HF path runs unquantized."""
        return any(matches(pattern, layer) for pattern in self.ignored_layers)


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """The ranks."""

    tp: int
    dp: int
    ep: int
    max_dispatch_tokens: int | None = None  # the operator's limit of one rank's all-to-all

    @property
    def world_size(self) -> int:
        """Processes in all."""
        return self.tp * self.dp


@dataclass(frozen=True, slots=True)
class SpecPlan:
    """Speculative decoding.

    Attributes:
        algorithm: `mtp`.
        num_steps: Tokens drafted before each verification.
        num_draft_tokens: Tokens verified a step, the bonus token's position included; the most,
            where the number adapts.
        adaptive: Fewer are drafted where few are accepted, never more.
        draft_path: Folder of the draft's weights; `None`: the model's own.
    """

    algorithm: str
    num_steps: int
    num_draft_tokens: int
    adaptive: bool = False
    draft_path: str | None = None


@dataclass(frozen=True, slots=True)
class GraphPlan:
    """What is captured; zeros: nothing."""

    max_decode_batch: int
    max_prefill_tokens: int

    @property
    def decode_batches(self) -> tuple[int, ...]:
        """Sequences of each captured decode step: as close as steps of 8 rows are worth it."""
        sizes = (1, 2, 4, *range(8, 256, 8), *range(256, 512, 16), *range(512, 1 << 16, 32))
        return _up_to(self.max_decode_batch, sizes)

    @property
    def prefill_sizes(self) -> tuple[int, ...]:
        """Tokens of each captured prefill step."""
        return _up_to(self.max_prefill_tokens, (32, 64, 128, *range(256, 1 << 20, 256)))


def _up_to(most: int, sizes: Iterable[int]) -> tuple[int, ...]:
    """Return those below `most`, and `most`; nothing for 0."""
    return (*takewhile(lambda size: size < most, sizes), most) if most else ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulePlan:
    """Who may run, and how many tokens a step may have."""

    max_running_requests: int
    max_prefill_tokens: int
    chunk_tokens: int  # a multiple of the page size; 0: prompts are not chunked
    mixed_chunk: bool  # decodes ride along with a prefill chunk
    prefix_cache: bool
    overlap: bool = False  # a step is launched before the results of the last one are read


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenBudget:
    """The most tokens any forward can hold. All static buffers are sized by it.

    Attributes:
        per_rank: One rank's own tokens.
        rows: Rows an expert layer can see after dispatch.
        term: What dominates `per_rank`, in words; quoted when a buffer overflows.
    """

    per_rank: int
    rows: int
    term: str

    def require(self, rows: int) -> None:
        """Refuse a forward that the buffers were not sized for.

        Raises:
            CapacityExceeded: More rows than capacity; the message names what set it.
        """
        if rows > self.rows:
            raise CapacityExceeded(
                f"an expert layer was handed {rows} rows and has room for {self.rows}",
                why=f"buffers were sized for {self.per_rank} tokens a rank: {self.term}",
                fix="this is a defect of the scheduler: report it with the output of "
                "`tetrarch explain`",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertPlan:
    """How the experts are computed."""

    route: Route
    finalize: Finalize
    budget: TokenBudget
    decoded_cache: bool  # reference runner: keep decoded weights beside the packed ones


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The KV pool, and what can be released.

    The executor measures what is free after loading, within these bounds.
    """

    page_size: int
    max_total_tokens: int | None  # the operator's cap; None: by memory
    kv_bytes: int | None  # the operator's size in bytes; None: by fraction
    fraction: float  # of what is free after loading, where neither of the two is given
    saver: bool = False  # GPU memory can be released; a CPU's always can
    weights_backup: bool = False  # released weights are kept in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePlan:
    """The HTTP door."""

    host: str
    port: int
    api_key: str | None = field(repr=False)
    admin_api_key: str | None = field(repr=False)
    chat_template: str | None
    log_level: str
    incremental_streaming: bool
    allow_auto_truncate: bool
    stream_interval: int
    max_body_bytes: int
    weights_root: str = "/"  # what an update of the weights may read, symlinks resolved


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything the system needs to know, decided."""

    model: ModelPlan
    quant: QuantPlan
    parallel: ParallelPlan
    experts: ExpertPlan
    spec: SpecPlan | None
    graphs: GraphPlan
    memory: MemoryPlan
    schedule: SchedulePlan
    serve: ServePlan
    device: Device
    attention: str  # "torch" | "triton": who computes it
    deterministic: bool
    compiles_layers: bool = False  # by torch.compile
    num_threads: int  # CPU threads of one engine process
    process_env: tuple[tuple[str, str], ...]  # what libraries read; set at spawn only
    decisions: tuple[Decision, ...]
