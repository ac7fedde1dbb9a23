"""Multi-token prediction: what it computes, by another implementation, in every layout, and what it holds and costs."""

import functools
import math
import tempfile
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from common.counts import count_flops, count_parameters
from common.errors import UsageError
from common.presets import PRESETS
from common.start import environment
from step01_single_gpu.data.batches import load_batches
from step01_single_gpu.running.slow_device import SlowDevice
from step05_pipeline.stages import split_layers
from step08_5d import multi_token, train
from step08_5d.kernels.cross_entropy import IGNORED
from tests.harness.observing import configure, mesh_of
from tests.harness.ranks import steps_of
from tests.mechanisms.step08 import test_fused as fused
from tests.mutants.patches import patched
from tests.parity import runs
from tests.parity import test_fp8 as fp8
from tests.parity.cases import AUX, BIAS, CAPACITY, CONTIGUOUS, DOCUMENTS, FOUR, GATHER, LIMIT, ONE, SHARED, TWO, WHOLE
from tests.parity.drawn import ALL, EVERY, draw, is_allowed
from tests.parity.runs import ADAMW, SGD, SMALL, TIED, UNTIED, assemble, assert_parity, train_here, training_of

# ---- another implementation ------------------------------------------------------------------------------------------


class Plain:
    """The model by the paper's equations, from whole weights by their names: no module of ours, nothing divided."""

    def __init__(self, weights: dict[str, torch.Tensor], config):
        self.w, self.config = weights, config

    def norm(self, x, name):
        return self.w[f"{name}.weight"] * x / (x.pow(2).mean(-1, keepdim=True) + self.config.norm_eps).sqrt()

    def block(self, x, number: int, allowed):
        """x (seq, hidden) of one sequence; allowed (seq, seq): which positions see which."""
        config, at = self.config, f"layers.{number}"
        d, pairs = config.head_width, config.head_width // 2
        angles = torch.arange(len(x))[:, None] * config.rope_theta ** (-torch.arange(pairs).double() / pairs)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]

        def heads(name: str, turned: bool):
            y = (normed @ self.w[f"{at}.attention.{name}.weight"].T).unflatten(-1, (-1, d))  # (seq, heads, d)
            if turned:
                z = torch.complex(y[..., :pairs], y[..., pairs:]) * turn
                y = torch.cat((z.real, z.imag), -1)
            return y.repeat_interleave(config.heads // y.shape[1], dim=1)

        normed = self.norm(x, f"{at}.attention_norm")
        q, k, v = heads("q_proj", True), heads("k_proj", True), heads("v_proj", False)
        scores = torch.einsum("ihd,jhd->hij", q, k) / math.sqrt(d)
        out = torch.einsum("hij,jhd->ihd", scores.masked_fill(~allowed, -math.inf).softmax(-1), v)
        x = x + out.flatten(1) @ self.w[f"{at}.attention.o_proj.weight"].T
        normed = self.norm(x, f"{at}.mlp_norm")
        gate, up = (normed @ self.w[f"{at}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
        return x + (F.silu(gate) * up) @ self.w[f"{at}.mlp.down_proj.weight"].T

    def losses(self, tokens, end: int | None):
        """tokens (seq + 1,) -> sums over a sequence: of -log p(next token), and of -log p(the one after it)."""
        seq, layers, embedding = len(tokens) - 1, self.config.layers, self.w["embedding.weight"]
        document = torch.zeros(seq, dtype=torch.int64)
        if end is not None:
            document[1:] = (tokens[: seq - 1] == end).cumsum(0)
        allowed = torch.ones(seq, seq).tril().bool() & (document[:, None] == document[None])
        h = embedding[tokens[:seq]]
        for number in range(layers):
            h = self.block(h, number, allowed)
        head = self.w.get("head.weight", embedding)
        first = (self.norm(h, "norm") @ head.T).log_softmax(-1)
        at = f"layers.{layers}"
        both = torch.cat((self.norm(embedding[tokens[1:]], f"{at}.enorm"), self.norm(h, f"{at}.hnorm")), -1)
        again = self.block(both @ self.w[f"{at}.eh_proj.weight"].T, layers, allowed)
        second = (self.norm(again, f"{at}.shared_head.norm") @ head.T).log_softmax(-1)
        main = -sum(first[i, tokens[i + 1]] for i in range(seq))
        ahead = [i for i in range(seq - 1) if end is None or tokens[i] != end]
        return main, -sum(second[i, tokens[i + 2]] for i in ahead)


def plain_step(flags: str) -> tuple[float, float, dict[str, torch.Tensor]]:
    """Both losses of the first step, and the weights after one of SGD at learning rate 0.1."""
    config = configure(8, flags)
    mesh = mesh_of(config)
    _, optimizer, _ = train.build(config, mesh)
    weights = {
        each.spec.name: torch.zeros(each.spec.global_shape, dtype=torch.float64) for each in optimizer.parameters
    }
    for name, piece in ((each.spec.name, each) for each in optimizer.parameters):  # one rank: the pieces are whole
        weights[name] = piece.detach().view(piece.spec.global_shape).clone().requires_grad_()
    batches, model = load_batches(config, mesh), Plain(weights, config.model_config)
    tokens, targets = batches.micro_batch(0, 0, config.global_batch)
    end = batches.corpus.end if config.mask_documents else None
    sums = [model.losses(torch.cat((row, last[-1:])), end) for row, last in zip(tokens, targets, strict=True)]
    main, ahead = (sum(each) / batches.target_tokens for each in zip(*sums, strict=True))
    (main + config.mtp_weight * ahead).backward()
    return main.item(), ahead.item(), {name: (w - 0.1 * w.grad).detach() for name, w in weights.items()}


PLAIN = [f"{UNTIED} {DOCUMENTS} --recompute full --micro-batch 4", UNTIED, f"{TIED} --no-fused --mtp-weight 0.7"]


@pytest.mark.parametrize("flags", PLAIN if ALL else PLAIN[:1])
def test_the_papers_equations(flags, tmp_path):
    base = f"{SMALL} --optimizer sgd --lr 0.1 --warmup 0 --clip 0 --weight-decay 0 --steps 1 --layers 1 --mtp 1"
    flags = f"{base} --global-batch 4 --micro-batch 2 {flags}"
    main, ahead, weights = plain_step(flags)
    found = assemble([{"curve": [(1, 1)], "boxes": train_here(8, f"{flags} --run-dir {tmp_path}")}])
    (line,) = steps_of(tmp_path)
    assert line["loss"] == pytest.approx(main, rel=1e-12) and line["mtp_loss"] == pytest.approx(ahead, rel=1e-12)
    assert found.parameters.keys() == weights.keys()
    for name, expected in weights.items():
        np.testing.assert_allclose(found.parameters[name], expected.numpy(), rtol=0, atol=1e-13, err_msg=name)


# ---- layouts ---------------------------------------------------------------------------------------------------------


def train_both(cases: list[str], mutants: list[str | None] | None = None) -> list[dict]:
    """As `runs.train_cases`; the second loss of each step is compared as if it were one more parameter."""
    found = []
    for flags, mutant in zip(cases, mutants or [None] * len(cases), strict=True):
        with tempfile.TemporaryDirectory() as folder, patched(mutant):
            boxes = train_here(8, f"{SMALL} --mtp 1 {flags} --run-dir {folder}")
            lines = steps_of(folder) if environment().rank == 0 else []
        second = np.array([line["mtp_loss"] for line in lines])
        boxes += [("mtp_loss", second.shape, ((0, len(second)),), second)] if lines else []
        found.append({"curve": [(line["loss"], line["grad_norm"]) for line in lines], "boxes": boxes})
    return found


@functools.cache
def one_process(flags: str) -> runs.Result:
    return assemble(train_both([flags]))


CHOSEN = f"--top-k 3 --gate sigmoid {LIMIT} {SHARED} --dense-layers 1 {BIAS}"
CASES = {  # by ranks
    2: [
        f"{UNTIED} {ADAMW} --pp 2 {FOUR}",  # the embedding at both ends, though it is not the head
        f"{UNTIED} {SGD} --dp 2 --micro-batch 3 --zero 3",
        f"{TIED} {ADAMW} --dp 2 --micro-batch 3 --zero 3 --recompute full --no-fused",
        f"{UNTIED} {ADAMW} --dp 2 --micro-batch 2 --zero 2 --bucket-mb 0.01",
        f"{UNTIED} {SGD} --tp 2 {ONE}",
        f"{TIED} {ADAMW} --tp 2 {TWO} --vocab 257 --zero 1",
        f"{UNTIED} {ADAMW} --tp 2 {TWO} {WHOLE} --no-fused",
        f"{UNTIED} {SGD} --cp 2 {ONE}",
        f"{DOCUMENTS} {UNTIED} {ADAMW} --cp 2 {TWO} {GATHER} {CONTIGUOUS}",
        f"{TIED} {ADAMW} --pp 2 {FOUR} --schedule zb-h1 --no-fused",
        f"{UNTIED} {ADAMW} --pp 2 {FOUR} --schedule zb-h1 --zero 3",
        f"{UNTIED} {ADAMW} --pp 2 {FOUR} --schedule dualpipe --zero 1",
        f"{TIED} {ADAMW} --pp 2 {FOUR} --layers 4 --schedule zbv --recompute full",
        f"{UNTIED} {SGD} --pp 2 {FOUR} --layers 4 --schedule dualpipev",
        f"{UNTIED} {ADAMW} --pp 2 {FOUR} --layers 4 --schedule interleaved",
        f"--experts 4 --expert-ffn 20 {BIAS} {ADAMW} --dp 2 --ep 2 --micro-batch 3",
    ],
    4: [
        f"--experts 8 {CHOSEN} {CAPACITY} {ADAMW} {DOCUMENTS} --tp 2 --cp 2 --ep 4 {TWO} --zero 1",
        f"--experts 8 --top-k 3 {SHARED} {AUX} {SGD} --tp 2 --pp 2 --ep 2 {TWO} --schedule dualpipe --zero 1",
        f"{DOCUMENTS} {UNTIED} {ADAMW} --tp 2 --pp 2 {TWO} --recompute full --vocab 257",
        f"{TIED} {SGD} --dp 2 --pp 2 --schedule zb-h1 {FOUR} --zero 3 --recompute selective",
        f"{UNTIED} {ADAMW} --dp 2 --cp 2 {FOUR} --zero 3 --zero-replicas 2",
    ],
    8: [f"--experts 8 {CHOSEN} {ADAMW} --pp 2 --dp 2 --tp 2 --ep 4 --schedule dualpipev --layers 4 {TWO}"],
}
for ranks, least in EVERY if ALL else ():
    drawn = (case for case in draw(ranks, least, EVERY[ranks, least]) if is_allowed(ranks, f"{case} --mtp 1"))
    CASES.setdefault(ranks, []).extend(drawn)
CASES = CASES if ALL else {4: CASES[4][:1]}  # of two ranks, the mutants' test has some
WORLDS = [(ranks, first) for ranks, cases in CASES.items() for first in range(0, len(cases), 8)]  # time limits


@pytest.mark.parametrize("ranks, first", WORLDS)
def test_equals_one_process(ranks, first):
    cases = CASES[ranks][first : first + 8]
    for case, result in zip(cases, runs.results_of(ranks, train_both, cases), strict=True):
        assert_parity(result, one_process(training_of(case)), f"{ranks} ranks, {case}")


@pytest.mark.skipif(not ALL, reason="TEST_ALL")
def test_operands_in_fp8():
    """The projection is whole on every tensor rank, which has a part of its tokens."""
    cases = [  # the micro-batch of the one process that has the same tokens in a product: flags
        (3, f"{fp8.SHAPE} {UNTIED} {SGD} {fp8.TILE} --tp 2 --micro-batch 3"),
        (3, f"{fp8.SHAPE} {TIED} {ADAMW} {fp8.NOW} --tp 2 --micro-batch 3 --zero 3"),
        (3, f"{fp8.SHAPE} {UNTIED} {ADAMW} {fp8.DELAYED} --tp 2 --micro-batch 3"),
        (3, f"{fp8.SHAPE} {UNTIED} {ADAMW} {fp8.ROW} --tp 2 --micro-batch 3 {WHOLE}"),
        (3, f"{fp8.SHAPE} {UNTIED} {ADAMW} {fp8.MX} --cp 2 --micro-batch 3"),
        (3, f"{fp8.SHAPE} {UNTIED} {ADAMW} {fp8.TILE} {fp8.GATHERED} --dp 2 --micro-batch 3"),
        (2, f"{fp8.SHAPE} {UNTIED} {ADAMW} {fp8.TILE} --pp 2 --micro-batch 2 --schedule zb-h1 --recompute full"),
        (2, f"{fp8.SHAPE} {UNTIED} {ADAMW} {fp8.TILE} --pp 2 --micro-batch 2 --schedule dualpipe"),
        (3, f"{fp8.SHARED} {SGD} {fp8.ROW} --tp 2 --ep 2 --micro-batch 3 --fp8-dispatch"),
    ]
    cases = [(micro_batch, f"--mtp 1 {flags}") for micro_batch, flags in cases]
    for (micro_batch, flags), result in zip(cases, fp8.run_narrow(2, [flags for _, flags in cases]), strict=True):
        assert_parity(result, fp8.one_process(flags, micro_batch), flags, fp8.TOLERANCE)


@pytest.mark.skipif(not ALL, reason="TEST_ALL")
@fused.in_interpreter
def test_with_kernels():
    """They add the head's gradient, of both predictions, to the step's sum; if it is tied, the embedding's follows."""
    cases = [f"{UNTIED} --tp 2 --vocab 257", f"{UNTIED} --layers 2 --pp 2 --micro-batch 2"]
    cases += [f"{TIED} --layers 2 --pp 2 --micro-batch 2 --schedule {name}" for name in ("1f1b", "zb-h1")]
    cases += [f"{TIED} {fused.EXPERTS} --dp 2 --ep 2 --zero 3 --micro-batch 2 --recompute full"]
    cases = [f"{fused.TINY} {ADAMW} --mtp 1 {flags}" for flags in cases]
    for case, result in zip(cases, runs.results_of(2, fused.train_with_kernels, cases), strict=True):
        assert_parity(result, runs.reference(training_of(case, 4)), case)


# ---- targets ---------------------------------------------------------------------------------------------------------


def test_second_targets():
    tokens = torch.tensor([[5, 1, 7, 8, 9, 1]])  # 1 ends a document
    targets = torch.tensor([[1, 7, 8, 9, 1, 4]])
    assert multi_token.second_targets(tokens, targets).tolist() == [[7, 8, 9, 1, 4, IGNORED]]
    assert multi_token.second_targets(tokens, targets, end=1).tolist() == [[7, IGNORED, 9, 1, 4, IGNORED]]
    assert targets.tolist() == [[1, 7, 8, 9, 1, 4]]


def test_targets_across_the_borders_of_parts():
    """A rank's last token knows what follows on another rank, with every way to divide a sequence."""
    for split in ("zigzag", "contiguous", "striped"):
        config = configure(8, f"{SMALL} --mtp 1 --cp 2 --cp-split {split}", 2)
        tokens = torch.arange(24).expand(3, 24)
        for rank in range(2):
            mesh = mock.Mock(device=torch.device("cpu"))
            mesh.cp.size, mesh.cp.rank = 2, rank
            part, (first, second, positions, mask) = multi_token.take_part(tokens, tokens + 1, config, mesh, None)
            assert torch.equal(first, part + 1) and torch.equal(positions.expand(3, 12), part) and mask == ()
            assert torch.equal(second, torch.where(part == 23, IGNORED, part + 2)), split


# ---- what it holds and costs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("flags", [UNTIED, f"{TIED} --experts 4 --expert-ffn 20 --shared-experts 1 --dense-layers 1"])
def test_counts_are_exact(flags):
    config = configure(8, f"{SMALL} --mtp 1 {flags} --micro-batch 12 --peak-tflops 1")
    mesh = mesh_of(config)
    pipeline, optimizer, statistics = train.build(config, mesh)
    assert sum(each.numel() for each in optimizer.parameters) == count_parameters(config.model_config).total
    batches, flops = load_batches(config, mesh), count_flops(config.model_config, config.seq_len)
    with SlowDevice(1e18) as device:
        tracer = train.Tracer()
        train.train_step(0, pipeline, optimizer, statistics, batches, config, mesh, tracer)
    unmasked = flops.model - 3 * flops.attention_core + 3 * flops.attention_core / 2
    if not config.model_config.experts:
        assert device.flops == pytest.approx(unmasked * config.global_batch, rel=0.02)


def test_the_last_stage_has_fewer_layers():
    shape = replace(PRESETS["debug"], layers=16)
    without, with_block = split_layers(shape, 4, 256), split_layers(replace(shape, mtp=1), 4, 256)
    assert [stop - start for start, stop in without] == [4, 4, 4, 4]
    assert [stop - start for start, stop in with_block] == [4, 4, 5, 3]
    full = PRESETS["deepseek-v3-like"]
    more = count_parameters(replace(full, mtp=1)).total - count_parameters(full).total
    assert more == 256 * 3 * 7168 * 2048 + 7168 * 256 + 3 * 7168 * 2048 + count_parameters(
        full
    ).attention + 5 * 7168 + (2 * 7168 * 7168)


def test_what_is_refused():
    for flags, words in (("--mtp 2", "--mtp 2 must be 0 or 1"), ("--mtp-weight 0.1", "--mtp-weight 0.1 needs --mtp 1")):
        with pytest.raises(UsageError, match=words):
            configure(8, f"{SMALL} {flags}")
    assert configure(8, f"{SMALL} --mtp 0").model_config.mtp == 0
    with pytest.raises(UsageError, match="is not Q,KV,NOPE,ROPE,VALUE"):
        configure(8, f"{SMALL} --latent=")
