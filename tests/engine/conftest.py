# SPDX-License-Identifier: Apache-2.0
"""An executor without a model: its next token depends on everything read through the pages.

What a position stores depends on all tokens before it, as keys and values do. A page that is
stale, shared under the wrong beginning, or given to two sequences therefore changes tokens.
"""

from __future__ import annotations

import random
import shutil
import time
import zlib
from collections import Counter, deque
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from tetrarch.config.budget import token_budget, tokens_per_request
from tetrarch.config.plan import GraphPlan, ParallelPlan, Plan, SchedulePlan, SpecPlan
from tetrarch.engine.engine import Engine
from tetrarch.engine.loop import EngineLoop
from tetrarch.engine.messages import ControlReply, Heartbeat, encode
from tetrarch.engine.pages import PagePool
from tetrarch.engine.request import Delta, FinishReason, GenerateRequest, SamplingParams
from tetrarch.engine.text import Tokenizer, load_tokenizer
from tetrarch.executor.capacity import Capacity
from tetrarch.executor.executor import Executor
from tetrarch.executor.regions import RegionChange, RegionState
from tetrarch.executor.step import (
    FUTURE,
    Done,
    Pending,
    Phase,
    PromptScoring,
    SampleSpec,
    SeqChunk,
    SeqResult,
    Step,
    StepResult,
    TokenLogprob,
)
from tetrarch.executor.updates import WeightsState
from tetrarch.memory.checksum import combine
from tetrarch.memory.slots import Region

VOCAB = 512
EOS = 2
PROMPT = tuple(range(20, 33))
NAN = 511  # a prompt that holds this token has logits that are not finite


def digest(*values: object) -> int:
    return zlib.crc32(repr(values).encode())


def stored(tokens: Sequence[int]) -> list[int]:
    """What the pages should hold for a sequence of tokens."""
    values: list[int] = []
    for token in tokens:
        values.append(digest(values[-1] if values else 0, token))
    return values


def draw(values: Sequence[int], spec: SampleSpec) -> int:
    salt = (spec.seed, spec.position) if spec.temperature > 0 else ()
    token = digest(list(values), salt, spec.prompt_ids, spec.output_ids) % (NAN // 2)
    while token in spec.banned_ids:
        token += 1
    return token


def score(values: Sequence[int], target: int) -> TokenLogprob:
    return TokenLogprob(target, -(digest(list(values), target) % 1000) / 100)


class FakeWeights:
    """Counts what is asked of it. An update is a list of what it still lacks."""

    def __init__(self) -> None:
        self.state, self.path = WeightsState.READY, "nowhere"
        self.lacking: list[str] | None = None  # of the update that is open

    @property
    def is_open(self) -> bool:
        return self.lacking is not None

    @property
    def open_s(self) -> float:
        return 1.5 if self.is_open else 0.0


class FakeDraft:
    """Proposes what the target will say for the first `num_right` tokens, then something else.

    Args:
        num_right: Drawn anew for each proposal by `rng`, up to this.
        nan_rate: How often a wrong token is one that makes the logits around it NaN.
    """

    def __init__(self, num_right: int = 99, *, exact: bool = True, nan_rate: float = 0.0) -> None:
        self.num_right, self.exact, self.nan_rate = num_right, exact, nan_rate
        self.rng = random.Random(0)

    def propose(self, values: list[int], spec: SampleSpec, count: int) -> tuple[int, ...]:
        """Go on from what the pages hold, and how the token after that is drawn."""
        right = self.num_right if self.exact else self.rng.randint(0, self.num_right)
        drafts: list[int] = []
        for ahead in range(count):
            token = draw(values, spec)
            if ahead >= right:
                token = NAN if self.rng.random() < self.nan_rate else token + 1
            drafts.append(token)
            values = [*values, digest(values[-1], token)]
            outputs = (*spec.output_ids, token) if spec.output_ids else ()
            spec = replace(spec, position=spec.position + 1, output_ids=outputs)
        return tuple(drafts)


class Owners:
    """Notices a write into pages that have been let go since it was launched."""

    def __init__(self, pool: PagePool) -> None:
        self._pool, self._take = pool, pool.take
        self._times_taken = Counter[int]()
        pool.take = self._note_taken  # pyright: ignore[reportAttributeAccessIssue]

    def _note_taken(self, count: int) -> tuple[int, ...]:
        pages = self._take(count)
        self._times_taken.update(pages)
        return pages

    def of(self, pages: Sequence[int]) -> tuple[int, ...]:
        """Who holds the pages: the how-manieth taker of each; -1 for nobody."""
        holders = self._pool._holders
        return tuple(self._times_taken[page] if holders[page] else -1 for page in pages)


class FakePending:
    """A step that is computed when somebody waits for it, as late as that can be."""

    def __init__(self, executor: FakeExecutor, step: Step) -> None:
        self._executor, self._step = executor, step
        self._owners = self._owners_of_written()

    def wait(self) -> StepResult:
        assert self._executor.flying.popleft() is self, "steps are waited for in order"
        assert self._owners_of_written() == self._owners, "a write into somebody else's page"
        return self._executor.compute(self._step)

    def _owners_of_written(self) -> list[tuple[int, ...]]:
        size, owners = self._executor.capacity.page_size, self._executor.owners
        assert owners is not None
        return [owners.of(seq.pages[seq.start // size :]) for seq in self._step.seqs]


class FakeExecutor:
    """Also stands for the rank's memory: a set of regions.

    Steps are computed when they are waited for, over the tokens and pages there are by then.
    """

    def __init__(
        self, plan: Plan, num_pages: int, page_size: int, draft: FakeDraft | None = None
    ) -> None:
        self.draft = draft
        self.weights = FakeWeights()
        self.device = torch.device("cpu")
        self.released: set[Region] = set()
        self.capacity = Capacity(num_pages, page_size)
        self.moe_tokens_high_water = 0
        self.steps: list[Step] = []
        self.flying: deque[FakePending] = deque()
        self.owners: Owners | None = None  # of the engine's pages
        self._last_ids: dict[int, int] = {}
        self._plan = plan
        self._pool = [random.getrandbits(30) for _ in range(num_pages * page_size)]

    @property
    def region_states(self) -> dict[Region, RegionState]:
        return {
            tag: RegionState.RELEASED if tag in self.released else RegionState.RESIDENT
            for tag in Region
        }

    @property
    def state(self) -> str:
        if self.weights.state is not WeightsState.READY:
            return self.weights.state.value
        return "kv_released" if Region.KV_CACHE in self.released else "ready"

    def release(self, tags: Sequence[Region], *, backup: bool | None = None) -> RegionChange:
        already = tuple(tag for tag in tags if tag in self.released)
        self.released |= set(tags)
        if Region.WEIGHTS in tags:
            self.weights.state = WeightsState.RELEASED
        return RegionChange({tag: 0 if tag in already else 100 for tag in tags}, already)

    def resume(self, tags: Sequence[Region]) -> RegionChange:
        already = tuple(tag for tag in tags if tag not in self.released)
        self.released -= set(tags)
        if Region.WEIGHTS in tags and Region.WEIGHTS not in already:
            self.weights.state = WeightsState.NOT_LOADED
        return RegionChange({tag: 0 if tag in already else 100 for tag in tags}, already)

    def launch(self, step: Step) -> Pending:
        assert step.seqs
        assert self.state == "ready", "a step over memory that is not there"
        assert step.num_tokens == sum(step.rank_tokens)
        assert step.num_tokens <= self._plan.experts.budget.per_rank, "over the budget"
        assert len({seq.row for seq in step.seqs}) == len(step.seqs)
        assert len(self.flying) <= self._plan.schedule.overlap, "too far ahead"
        assert not (self.flying and any(seq.draft for seq in step.seqs))
        self.steps.append(step)
        self.moe_tokens_high_water = max(self.moe_tokens_high_water, step.num_tokens)
        self.flying.append(FakePending(self, step))
        return self.flying[-1]

    def compute(self, step: Step) -> StepResult:
        assert self.state == "ready", "memory was taken away under a step"
        seqs = [self._with_last_id(seq) for seq in step.seqs]
        for seq in seqs:
            self._write(seq)
        results = tuple(self._read(seq) for seq in seqs)
        for seq, result in zip(seqs, results, strict=True):
            if seq.samples:
                self._last_ids[seq.row] = result.token_ids[-1] if result.token_ids else 0
        return StepResult(results)

    def _with_last_id(self, seq: SeqChunk) -> SeqChunk:
        """Read what the row has drawn, whatever that is by now."""
        assert FUTURE not in seq.token_ids[:-1]
        if seq.token_ids[-1] != FUTURE:
            return seq
        return replace(seq, token_ids=(*seq.token_ids[:-1], self._last_ids[seq.row]))

    def _slot(self, seq: SeqChunk, position: int) -> int:
        page, offset = divmod(position, self.capacity.page_size)
        return seq.pages[page] * self.capacity.page_size + offset

    def _write(self, seq: SeqChunk) -> None:
        end = seq.start + len(seq.token_ids)
        needed = -(-end // self.capacity.page_size)
        assert len(seq.pages) == needed or (seq.draft is not None and len(seq.pages) > needed)
        assert len(seq.samples) <= tokens_per_request(self._plan.spec)
        assert seq.draft is None or self._plan.spec is not None
        assert 0 <= seq.row < self._plan.schedule.max_running_requests
        before = self._pool[self._slot(seq, seq.start - 1)] if seq.start else 0
        for position, token in enumerate(seq.token_ids, start=seq.start):
            before = digest(before, token)
            self._pool[self._slot(seq, position)] = before

    def _read(self, seq: SeqChunk) -> SeqResult:
        end = seq.start + len(seq.token_ids)
        values = [self._pool[self._slot(seq, position)] for position in range(end)]
        if NAN in seq.token_ids:
            return SeqResult(failed=True)
        scores = () if seq.scoring is None else self._scores(seq, seq.scoring, values)
        token_ids: list[int] = []
        logprobs: list[TokenLogprob] = []
        first = end - len(seq.samples) + 1  # length of what the first row has read
        for ahead, spec in enumerate(seq.samples):
            read = values[: first + ahead]
            token_ids.append(draw(read, spec))
            if spec.top_logprobs >= 0:
                logprobs.append(score(read, token_ids[-1]))
            if ahead < len(seq.drafts) and token_ids[-1] != seq.drafts[ahead]:
                break
        return SeqResult(
            token_ids=tuple(token_ids),
            logprobs=tuple(logprobs),
            prompt_logprobs=scores,
            drafts=self._drafts(seq, values, token_ids),
        )

    def _drafts(self, seq: SeqChunk, values: list[int], token_ids: list[int]) -> tuple[int, ...]:
        """Propose as many as the pages hold: the entry of the last one is not written."""
        if seq.draft is None or not token_ids:
            return ()
        known = seq.start + len(seq.token_ids) - len(seq.samples) + len(token_ids)
        room = len(seq.pages) * self.capacity.page_size - known + 1
        assert seq.draft.num_drafts <= self._plan.spec.num_steps
        read = [*values[:known], digest(values[known - 1], token_ids[-1])]
        spec = seq.samples[0]
        outputs = (*spec.output_ids, *token_ids) if spec.output_ids or spec.presence_penalty else ()
        spec = replace(spec, position=spec.position + len(token_ids), output_ids=outputs)
        return self.draft.propose(read, spec, min(room, seq.draft.num_drafts))

    def _scores(
        self, seq: SeqChunk, scoring: PromptScoring, values: list[int]
    ) -> tuple[TokenLogprob, ...]:
        first = seq.start + scoring.first + 1
        assert first + len(scoring.targets) <= seq.start + len(seq.token_ids) + 1
        return tuple(
            score(values[:position], target)
            for position, target in enumerate(scoring.targets, start=first)
        )


def fake_plan(
    *,
    chunk: int,
    max_prefill: int,
    running: int,
    mixed: bool,
    cache: bool,
    context: int,
    overlap: bool,
    spec: SpecPlan | None,
) -> Plan:
    schedule = SchedulePlan(
        max_running_requests=running,
        max_prefill_tokens=max_prefill,
        chunk_tokens=chunk,
        mixed_chunk=mixed,
        prefix_cache=cache,
        overlap=overlap,
    )
    budget = token_budget(
        schedule,
        spec,
        graphs=GraphPlan(0, 0),
        parallel=ParallelPlan(1, 1, 1),
        dispatch="all_gather",
        context_len=context,
    )
    facts = SimpleNamespace(vocab_size=VOCAB)
    plan = SimpleNamespace(
        model=SimpleNamespace(path="nowhere", context_len=context, facts=facts),
        schedule=schedule,
        spec=spec,
        serve=SimpleNamespace(stream_interval=1, log_level="info"),
        experts=SimpleNamespace(budget=budget),
        process_env=(),
    )
    return cast("Plan", plan)


class Bench:
    """An engine over a fake executor, and everything it said."""

    def __init__(
        self,
        *,
        pages: int = 64,
        page_size: int = 4,
        tokenizer: Tokenizer | None = None,
        steps: int = 0,
        adaptive: bool = False,
        draft: FakeDraft | None = None,
        **limits: Any,
    ) -> None:
        defaults = dict(
            chunk=16,
            max_prefill=64,
            running=8,
            mixed=True,
            cache=True,
            context=128,
            overlap=False,
        )
        spec = SpecPlan("mtp", steps, steps + 1, adaptive=adaptive) if steps else None
        self.plan = fake_plan(**{**defaults, **limits, "spec": spec})
        self.executor = FakeExecutor(self.plan, pages, page_size, draft or FakeDraft())
        self.engine = Engine(self.plan, self.executor, tokenizer)
        self.executor.owners = Owners(self.engine._pool)
        self.deltas: dict[str, list[Delta]] = {}

    def add(self, rid: str, prompt: Sequence[int], **kw: Any) -> GenerateRequest:
        fields = {
            name: kw.pop(name) for name in list(kw) if name in GenerateRequest.__annotations__
        }
        sampling = SamplingParams(**{"temperature": 0.0, "max_new_tokens": 8, **kw})
        request = GenerateRequest(rid=rid, prompt_ids=tuple(prompt), sampling=sampling, **fields)
        self.engine.add(request)
        return request

    def hear(self, deltas: Sequence[Delta]) -> None:
        for delta in deltas:
            said = self.deltas.setdefault(delta.rid, [])
            assert not said or said[-1].finish is None, f"{delta.rid} spoke after its end"
            said.append(delta)

    def step(self, count: int = 1) -> None:
        for _ in range(count):
            self.hear(self.engine.step())

    def drain(self) -> None:
        self.hear(self.engine.drain())

    def run(self, limit: int = 5000) -> None:
        for _ in range(limit):
            if not self.engine.has_work:
                return
            before = self.engine.counters["steps"]
            self.step()
            assert self.engine.counters["steps"] == before + 1, "work, but no step"
        raise AssertionError("does not end")

    def tokens(self, rid: str) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas.get(rid, []) for token in delta.token_ids)

    def last(self, rid: str) -> Delta:
        return self.deltas[rid][-1]

    def expected(self, request: GenerateRequest) -> tuple[int, ...]:
        """What the request yields alone, without pages or batches."""
        sampling, tokens = request.sampling, list(request.prompt_ids)
        ends = set(sampling.stop_token_ids)
        limit = self.engine.limits.max_tokens
        if sampling.max_new_tokens is not None:
            limit = min(limit, len(tokens) + sampling.max_new_tokens)
        outputs: list[int] = []
        while len(tokens) < limit:
            early = len(outputs) < sampling.min_new_tokens
            spec = SampleSpec(
                temperature=sampling.temperature,
                seed=sampling.sampling_seed or 0,
                position=len(outputs),
                output_ids=tuple(outputs) if sampling.presence_penalty else (),
                banned_ids=tuple(sorted(ends)) if early else (),
            )
            outputs.append(draw(stored(tokens), spec))
            tokens.append(outputs[-1])
            if outputs[-1] in ends and len(outputs) > sampling.min_new_tokens:
                break
        return tuple(outputs)

    def check_pages(self) -> None:
        """Nothing is held once nobody lives."""
        beat = self.engine.heartbeat()
        assert (beat.num_running, beat.num_waiting, beat.num_used_tokens) == (0, 0, 0)
        assert self.engine.flush()
        assert self.engine.heartbeat().num_cached_tokens == 0
        assert self.engine.snapshot()["num_free_tokens"] == beat.max_total_tokens


class Desk:
    """The loop of the engine process, turn by turn, and everything that it said."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.said: list[Any] = []
        self._inbox: list[bytes] = []
        self._num_asked = 0
        self.loop = EngineLoop(engine, self, self.said.extend)

    @staticmethod
    def request(rid: str, tokens: int = 12) -> GenerateRequest:
        """Always the same prompt."""
        sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
        return GenerateRequest(rid=rid, prompt_ids=PROMPT, sampling=sampling)

    def take(self, timeout: float | None) -> list[bytes]:
        inbox, self._inbox = self._inbox, []
        if not inbox and timeout is None:
            raise AssertionError("the engine would wait for ever")
        if not inbox and timeout:
            time.sleep(timeout)
        return inbox

    def send(self, *messages: Any) -> None:
        """Deliver messages together, and let one turn pass."""
        self._inbox += [encode(message) for message in messages]
        self.loop.turn()

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.loop.turn()

    def post(self, kind: type[Any], **fields: Any) -> int:
        """Send one control message; return its ticket."""
        self._num_asked += 1
        self.send(kind(ticket=self._num_asked, **fields))
        return self._num_asked

    def reply(self, ticket: int) -> ControlReply | None:
        found = [m for m in self.said if isinstance(m, ControlReply) and m.ticket == ticket]
        assert len(found) <= 1, "answered twice"
        return found[0] if found else None

    def ask(self, kind: type[Any], **fields: Any) -> ControlReply:
        """Send one control message, and take turns until it is answered."""
        ticket = self.post(kind, **fields)
        for _ in range(5000):
            if (reply := self.reply(ticket)) is not None:
                return reply
            self.turn()
        raise AssertionError("never answered")

    def run(self) -> None:
        """Take turns until nobody lives."""
        for _ in range(5000):
            if not self.engine.has_work:
                return
            self.turn()
        raise AssertionError("does not end")

    def deltas(self, rid: str) -> list[Delta]:
        return [m for m in self.said if isinstance(m, Delta) and m.rid == rid]

    def tokens(self, rid: str) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas(rid) for token in delta.token_ids)

    def finish(self, rid: str) -> FinishReason | None:
        deltas = self.deltas(rid)
        return deltas[-1].finish if deltas else None

    @property
    def beat(self) -> Heartbeat:
        """The last one that was told."""
        return [m for m in self.said if isinstance(m, Heartbeat)][-1]


@pytest.fixture
def make_desk() -> Callable[[Engine], Desk]:
    return Desk


class Watched:
    """An executor that notes what it ran: the phase, and the weights before and after."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self.steps: list[tuple[Phase, str, str]] = []
        self.is_watching = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.executor, name)

    def launch(self, step: Step) -> Pending:
        before = self.checksum() if self.is_watching else ""
        result = self.executor.step(step)
        self.steps.append((step.phase, before, self.checksum() if self.is_watching else ""))
        return Done(result)

    def checksum(self) -> str:
        return combine(self.executor.weights.checksums())


@pytest.fixture(scope="module")
def checkpoints(
    tiny_checkpoint: Callable[..., Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path, Path]:
    """Checkpoints A and B of one model, and B with a value that cannot be a weight."""
    sizes = {"num_hidden_layers": 2, "num_experts": 4}
    folder = tmp_path_factory.mktemp("updates")
    made = [tiny_checkpoint("qwen3_moe", seed=seed, **sizes).path for seed in (0, 1)]
    found = [Path(shutil.copytree(one, folder / str(seed))) for seed, one in enumerate(made)]
    bad = Path(shutil.copytree(found[1], folder / "bad"))
    tensors = load_file(bad / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.up_proj.weight"][3, 3] = torch.inf
    save_file(tensors, bad / "model.safetensors", metadata={"format": "pt"})
    return found[0], found[1], bad


@pytest.fixture(scope="module")
def new_tensors(checkpoints: tuple[Path, Path, Path]) -> dict[str, Tensor]:
    return load_file(checkpoints[1] / "model.safetensors")


@pytest.fixture(scope="module")
def checksums(
    checkpoints: tuple[Path, Path, Path], start_rank: Callable[..., Executor]
) -> tuple[str, str]:
    """Of A and of B, freshly loaded."""
    first, second = (Watched(start_rank(path)).checksum() for path in checkpoints[:2])
    return first, second


@pytest.fixture(scope="module")
def shared_rank(
    checkpoints: tuple[Path, Path, Path], start_rank: Callable[..., Executor]
) -> Executor:
    return start_rank(checkpoints[0])


@pytest.fixture
def rank(shared_rank: Executor, checkpoints: tuple[Path, Path, Path]) -> Watched:
    """Loaded with A, whatever the test before did to it."""
    shared_rank.resume(list(shared_rank.region_states))
    store = shared_rank.weights
    store.abandon()
    store.commit(store.plan(str(checkpoints[0]), atomic=None))
    return Watched(shared_rank)


@pytest.fixture
def model_desk(rank: Watched, make_desk: Callable[..., Any]) -> Any:
    return make_desk(Engine(rank.plan, rank))


@pytest.fixture
def make_bench() -> Callable[..., Bench]:
    return Bench


@pytest.fixture
def make_draft() -> Callable[..., FakeDraft]:
    return FakeDraft


@pytest.fixture
def bench(make_bench: Callable[..., Bench]) -> Bench:
    """Over a fake executor."""
    return make_bench()


@pytest.fixture
def desk(bench: Bench, make_desk: Callable[[Engine], Desk]) -> Desk:
    """Over a fake executor; files that need a real model's bits have a `desk` of their own."""
    return make_desk(bench.engine)


@pytest.fixture(scope="session")
def demo_tokenizer(demo_path: Path) -> Tokenizer:
    return load_tokenizer(str(demo_path))


@pytest.fixture(scope="session")
def fallback_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Word-start marks and byte fallback, as Llama 2 and Mixtral have; no chat template."""
    vocab = {"<unk>": 0, "\u2581Hello": 1, "\u2581world": 2, "\u4e2d": 3}
    vocab |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    backend = Backend(models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True))
    backend.pre_tokenizer = pre_tokenizers.Metaspace()
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(content=" ", left=1),
        ]
    )
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)
    return load_tokenizer(str(folder))


@pytest.fixture(scope="session")
def output_scores() -> Callable[[Sequence[int], Sequence[int]], list[TokenLogprob]]:
    """What the logprobs of an output must be."""

    def expect(prompt: Sequence[int], outputs: Sequence[int]) -> list[TokenLogprob]:
        values = stored([*prompt, *outputs])
        return [score(values[: len(prompt) + index], token) for index, token in enumerate(outputs)]

    return expect


@pytest.fixture(scope="session")
def prompt_scores() -> Callable[[Sequence[int], int], list[TokenLogprob]]:
    """What scoring a prompt from a position on must report."""

    def expect(prompt: Sequence[int], start: int) -> list[TokenLogprob]:
        values = stored(prompt)
        return [score(values[:at], prompt[at]) for at in range(max(start, 1), len(prompt))]

    return expect
