"""Pairs of curves of another program: a GPT in plain PyTorch, which shares nothing with the eight steps.

`python -m tests.diagnosis.foreign` trains them, in some minutes, and stores them in foreign.json beside this file.
Bfloat16 comes in two forms: autocast, and a model whose weights, gradients and moments are all of this type. Pairs
"of trained weights" begin where 400 steps in float32 have ended, as a fine-tuning does.
"""

import functools
import json
import math
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FILE = Path(__file__).with_name("foreign.json")
WIDTH, LAYERS, HEADS, SEQ, BATCH, STEPS, TAUGHT = 64, 4, 4, 64, 16, 24, 400
TRAINED = "of trained weights"
AUTOCAST, PURE, F32 = "autocast", "pure", "float32"
ROUNDING = ("4 micro-batches", "scores in memory", "samples in another order")
BUGS = (
    *(
        "divided by 4 twice",
        "decay on norms",
        "tanh for erf",
        "a smaller epsilon in norms",
        "one step ahead in the rates",
    ),
    *("no clipping", "norm without the embedding", "a gradient of the step before", "the batch before since step 10"),
    *("moments lost at step 10", "one bias not updated at step 12", "a step skipped at step 10"),
)


class Block(nn.Module):
    def __init__(self, change: str):
        super().__init__()
        self.change, epsilon = change, 1e-6 if change == "a smaller epsilon in norms" else 1e-5
        self.norms = nn.ModuleList(nn.LayerNorm(WIDTH, eps=epsilon) for _ in range(2))
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def attend(self, x: Tensor) -> Tensor:  # (batch, seq, width), as what it returns
        q, k, v = (y.unflatten(-1, (HEADS, -1)).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if self.change != "scores in memory":
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2)
        scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
        future = torch.ones(SEQ, SEQ, dtype=torch.bool).triu(1)
        return (scores.masked_fill(future, -math.inf).softmax(-1) @ v).transpose(1, 2).flatten(-2)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(self.attend(self.norms[0](x)))
        approximate = "tanh" if self.change == "tanh for erf" else "none"
        return x + self.down(F.gelu(self.up(self.norms[1](x)), approximate=approximate))


class GPT(nn.Module):
    def __init__(self, change: str):
        super().__init__()
        self.tokens, self.places = nn.Embedding(256, WIDTH), nn.Embedding(SEQ, WIDTH)
        self.blocks = nn.Sequential(*(Block(change) for _ in range(LAYERS)))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 256, bias=False)
        for embedding in (self.tokens, self.places):
            nn.init.normal_(embedding.weight, std=0.02)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.places.weight)))


@functools.cache
def text() -> Tensor:
    """A walk through the vocabulary whose paces are as long as the place says, give or take, (length,) int64."""
    paces = torch.randint(4, (20000,), generator=torch.Generator().manual_seed(1))
    walk = [0]
    for pace in paces.tolist():
        walk.append((walk[-1] + 1 + walk[-1] % 7 + 3 * pace) % 256)
    return torch.tensor(walk)


def batch(step: int, change: str) -> Tensor:
    """(BATCH, SEQ + 1) int64."""
    step -= change == "the batch before since step 10" and step >= 10
    starts = torch.randint(len(text()) - SEQ - 1, (BATCH,), generator=torch.Generator().manual_seed(step))
    starts = starts.flip(0) if change == "samples in another order" else starts
    return torch.stack([text()[start : start + SEQ + 1] for start in starts])


def train(kind: str, change: str, weights: dict | None, steps: int = STEPS, rate: float = 1e-3):
    """Train with one `change`. Returns [losses, gradient norms] and the weights at the end."""
    torch.manual_seed(0)
    model = GPT(change)
    model.load_state_dict(weights or model.state_dict())
    model.to({PURE: torch.bfloat16, "float64": torch.float64}.get(kind, torch.float32))
    named = dict(model.named_parameters())
    flat = [each for each in named.values() if each.ndim < 2]
    decay = [{"params": [each for each in named.values() if each.ndim > 1], "weight_decay": 0.1}]
    decay += [{"params": flat, "weight_decay": 0.1 * (change == "decay on norms")}]
    optimizer, curve = torch.optim.AdamW(decay, betas=(0.9, 0.95)), [[], []]
    number = 4 if change in ("4 micro-batches", "divided by 4 twice") else 1
    for step in range(steps):
        if not (change == "a gradient of the step before" and step == 7):
            optimizer.zero_grad(set_to_none=True)
        total = 0.0
        for tokens in batch(step, change).chunk(number):
            with torch.autocast("cpu", torch.bfloat16, enabled=kind == AUTOCAST):
                logits = model(tokens[:, :-1])
            logits = logits if kind == "float64" else logits.float()
            loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum") / (BATCH * SEQ)
            (loss / (number if change == "divided by 4 twice" else 1)).backward()
            total += loss.item()
        counted = list(named.values())[change == "norm without the embedding" :]
        norm = math.sqrt(sum(each.grad.double().square().sum().item() for each in counted))
        for each in named.values():
            each.grad *= 1.0 if change == "no clipping" else min(1.0, 1 / norm)
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1 + (change == "one step ahead in the rates")) / 10)
        if change == "moments lost at step 10" and step == 10:
            optimizer.state.clear()
        bias = named["blocks.0.qkv.bias"]
        before = bias.detach().clone()
        if not (change == "a step skipped at step 10" and step == 10):
            optimizer.step()
        if change == "one bias not updated at step 12" and step == 12:
            bias.data.copy_(before)
        for column, value in zip(curve, (total, norm)):
            column.append(float(f"{value:.9g}"))
    return curve, model.state_dict()


def main() -> None:
    torch.set_num_threads(1)
    _, trained = train(F32, "", None, TAUGHT, 2e-3)
    pairs = []
    for kind, start in ((F32, ""), (AUTOCAST, ""), (PURE, ""), (F32, TRAINED), (AUTOCAST, TRAINED), (PURE, TRAINED)):
        reference, _ = train(kind, "", trained if start else None)
        for change in (*ROUNDING, *BUGS):
            curve, _ = train(kind, change, trained if start else None)
            if curve == reference:  # in bfloat16, a small change of a weight may change nothing
                continue
            dtype, bug = F32 if kind == F32 else "bfloat16", change * (change in BUGS)
            name = f"{change}, {kind} {start}".rstrip()
            pairs.append({"name": name, "dtype": dtype, "bug": bug, "curves": [reference, curve]})
            print(name, flush=True)
    FILE.write_text("[\n" + ",\n".join(json.dumps(pair) for pair in pairs) + "\n]\n")


if __name__ == "__main__":
    main()
