"""Lab of step 8 in which the student writes a ring in which latents travel, and their gradients come home."""

import torch
from torch import Tensor

from common.labs.notes import Notes
from common.labs.ranks import Case
from common.labs.rules import SLACK, holds_at_most, sends_at_most
from common.labs.seen import count, keep
from common.labs.write import Expected, WriteLab, page

SIZES = "heads", "plain", "rotated", "value", "latent"
NAMES = "dq", "dlatent", "dkey", "dweight"
ROUNDED = "sums of gradients in bfloat16"
SWALLOWED = "every addition rounds it to eight bits: keep such a sum in float32, as `lse` is."


class Narrow(Case):
    """A case whose numbers are in bfloat16, and sums of gradients in float32."""

    def __str__(self) -> str:
        return f"{super().__str__()}, in bfloat16"


def _drawn(case: Case) -> list[Tensor]:
    """q, latent, key, weight and the gradient of the output, of the whole sequence."""
    random = torch.Generator().manual_seed(case.seed)
    batch, heads, tokens = case.batch, case.heads, case.tokens
    sizes = (batch, heads, tokens, case.plain + case.rotated), (batch, tokens, case.latent)
    sizes += (batch, tokens, case.rotated), (heads * (case.plain + case.value), case.latent)
    sizes += ((batch, heads, tokens, case.value),)
    drawn = [torch.randn(size, generator=random, dtype=torch.float64) for size in sizes]
    drawn[3] *= case.latent**-0.5
    return [each.bfloat16().double() for each in drawn] if isinstance(case, Narrow) else drawn


def _places(case: Case, rank: int) -> Tensor:
    """The positions of a rank's tokens, in zigzag."""
    parts = torch.arange(case.tokens).chunk(2 * case.ranks)
    return torch.cat((parts[rank], parts[-1 - rank]))


def _rotate(x: Tensor, positions: Tensor) -> Tensor:
    """Turn the pairs (i, i + d/2) of x (..., tokens, d) as the lab's file does."""
    half = x.shape[-1] // 2
    angles = positions[:, None] * 100.0 ** (-torch.arange(half, dtype=torch.float64) / half)
    turned = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
    return torch.cat((turned.real, turned.imag), dim=-1)


def _expanded(case: Case, latent: Tensor, turned: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Keys (batch, heads, tokens, plain + rotated), and values."""
    product = (latent @ weight.T).unflatten(-1, (case.heads, -1)).transpose(1, 2)
    key = turned[:, None].expand(-1, case.heads, -1, -1)
    return torch.cat((product[..., : case.plain], key), dim=-1), product[..., case.plain :]


def _attend(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> tuple[Tensor, Tensor]:
    """Attention by its definition, to keys that are `seen` (queries, keys): output, and log-sum-exp."""
    scores = (q @ k.mT * q.shape[-1] ** -0.5).masked_fill(~seen, -torch.inf)
    return scores.softmax(-1) @ v, scores.logsumexp(-1)


def _back(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, seen: Tensor) -> list[Tensor]:
    """dq, dk and dv, with output and log-sum-exp of the right attention, whatever the keys are."""
    p = ((q @ k.mT * q.shape[-1] ** -0.5) - lse[..., None]).exp() * seen
    dscores = p * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    return [dscores @ k, dscores.mT @ q, p.mT @ dout]


def _taken_for(case: Case, rank: int) -> Tensor:
    """Which keys a rank's queries see (its tokens, tokens) if those of rank - h are taken for those of rank + h."""
    mine, half = _places(case, rank), case.tokens // case.ranks // 2
    seen = mine[:, None] >= torch.arange(case.tokens)
    for hop in range(1, case.ranks):
        theirs, source = _places(case, (rank - hop) % case.ranks), (rank + hop) % case.ranks
        block = torch.zeros(2 * half, 2 * half, dtype=torch.bool)
        if source < rank:
            block[:, :half] = True
        elif source > rank:
            block[half:] = True
        seen[:, theirs] = block
    return seen


class Ring:
    """What each rank computes with the right keys, or with those of a known mistake."""

    def __init__(self, case: Case):
        self.case, drawn = case, _drawn(case)
        self.q, self.latent, self.key, self.weight, self.dout = drawn
        place = torch.arange(case.tokens)
        self.turned = _rotate(self.key, place)
        self.causal = place[:, None] >= place
        self.places = [_places(case, rank) for rank in range(case.ranks)]
        self.out, self.lse = _attend(self.q, *self.keys(self.turned), self.causal)

    def keys(self, turned: Tensor) -> tuple[Tensor, Tensor]:
        return _expanded(self.case, self.latent, turned, self.weight)

    def seen(self, rank: int) -> Tensor:
        return self.causal[self.places[rank]]

    def mistaken(self, rank: int) -> dict[str, list[tuple[Tensor, Tensor]]]:
        """What a mistake in what comes around is -> (rotated keys, what is seen), in each of its variants."""
        mine, seen, place = self.places[rank], self.seen(rank), torch.arange(self.case.tokens)
        received, again, own = place.clone(), place.clone(), torch.zeros(self.case.tokens, dtype=torch.bool)
        own[mine] = True
        for hop in range(self.case.ranks):
            theirs = self.places[(rank - hop) % self.case.ranks]
            received[theirs] = mine
            again[theirs] += mine
        return {
            "these queries have seen the rank's own tokens only. The others' latents must come around the ring.": [
                (self.turned, seen & own)
            ],
            "the key was never rotated: attention then knows nothing of positions.": [(self.key, seen)],
            "the key that came was rotated by the positions of the rank that it came to: rotate it at home, before it "
            "leaves, or by the positions of its own tokens.": [(_rotate(self.key, received), seen)],
            "the key was rotated twice, at home and where it arrived.": [
                (_rotate(self.key, again), seen),
                (_rotate(self.key, 2 * place), seen),
            ],
            "latents were taken for those of another rank. Messages go to the next rank: where did those start that "
            "have come h hops?": [(self.turned, _taken_for(self.case, rank))],
        }

    def forward(self, rank: int) -> Expected:
        mine, mistakes = self.places[rank], {}
        for text, variants in self.mistaken(rank).items():
            found = [_attend(self.q[:, :, mine], *self.keys(turned), seen) for turned, seen in variants]
            mistakes[text] = [{"out": out, "lse": lse} for out, lse in found]
        right = {"out": self.out[:, :, mine], "lse": self.lse[:, :, mine]}
        return Expected.of(right, mistakes, self.rough("out", "lse"))

    def rough(self, *names: str) -> dict[str, float]:
        return dict.fromkeys(names, 0.02) if isinstance(self.case, Narrow) else {}

    # ---- backward ----------------------------------------------------------------------------------------------------

    def back(self, rank: int, turned: Tensor, seen: Tensor) -> list[Tensor]:
        mine = self.places[rank]
        rows = [each[:, :, mine] for each in (self.dout, self.q)], [each[:, :, mine] for each in (self.out, self.lse)]
        return _back(*rows[0], *self.keys(turned), *rows[1], seen)

    def product(self, dk: Tensor, dv: Tensor) -> Tensor:
        """The gradient of the product (batch, tokens, heads * (plain + value))."""
        return torch.cat((dk[..., : self.case.plain], dv), dim=-1).transpose(1, 2).flatten(2)

    def backward(self) -> list[Expected]:
        """Of all ranks, because each adds to the gradients of all."""
        case, ranks = self.case, range(self.case.ranks)
        parts = [self.back(rank, self.turned, self.seen(rank)) for rank in ranks]
        products = [self.product(dk, dv) for _, dk, dv in parts]  # by whose queries cause it
        keys = [dk[..., case.plain :] for _, dk, _ in parts]  # (batch, heads, tokens, rotated)
        found, place = [], torch.arange(case.tokens)
        latents, turns = [each @ self.weight for each in products], [each.sum(1) for each in keys]
        dlatent, dturned = sum(latents), sum(turns)
        no_values, no_keys = (
            sum(self.product(dk * of_keys, dv * (1 - of_keys)) for _, dk, dv in parts) @ self.weight
            for of_keys in (1, 0)
        )

        def dweight(product: Tensor, of: Tensor = place) -> Tensor:
            return product[:, of].flatten(0, 1).T @ self.latent[:, of].flatten(0, 1)

        for rank in ranks:
            mine, guest = self.places[rank], self.places[(rank + 1) % case.ranks]

            def named(latent: Tensor, turned: Tensor, at: Tensor = mine, mine=mine) -> dict[str, Tensor]:
                return {"dlatent": latent[:, at], "dkey": _rotate(turned[:, at], -mine)}

            stays = sum(latents[rank][:, each] for each in self.places)
            turns_stay = sum(turns[rank][:, each] for each in self.places)
            away = [_rotate(turns[each][:, mine], -self.places[each]) for each in ranks]
            right = {"dq": parts[rank][0], **named(dlatent, dturned), "dweight": dweight(products[rank])}
            mistakes = {
                "only the rank's own queries have contributed: the gradient of a latent travels with it.": named(
                    latents[rank], turns[rank]
                ),
                "these are the gradients of the next rank's tokens: they have not come home yet.": named(
                    dlatent, dturned, guest
                ),
                "the latents went around, and the sums of their gradients stayed: this is what one rank's queries "
                "say about the tokens of all ranks, added up.": {
                    "dlatent": stays,
                    "dkey": _rotate(turns_stay, -mine),
                },
                "what the rank's own queries contribute is in here twice.": named(
                    dlatent + latents[rank], dturned + turns[rank]
                ),
                "a latent makes values, too, and their gradient is missing.": {"dlatent": no_values[:, mine]},
                "a latent makes keys, too, and their gradient is missing.": {"dlatent": no_keys[:, mine]},
                "the rotated key gets a gradient, too, and here it is forgotten.": {"dkey": torch.zeros_like(away[0])},
                "all heads share the rotated key, so all of them add to its gradient; here it is that of one head.": {
                    "dkey": _rotate(sum(each[:, 0] for each in keys)[:, mine], -mine)
                },
                "all heads share the rotated key, so its gradient is the sum of theirs, and not the mean.": {
                    "dkey": _rotate(dturned[:, mine] / case.heads, -mine)
                },
                "this is the gradient of the key as it is after its rotation: rotate it back.": {
                    "dkey": dturned[:, mine]
                },
                "the way back through a rotation is the rotation by -positions.": {
                    "dkey": _rotate(dturned[:, mine], mine)
                },
                "each rank has rotated its part back, by its own positions: those of the key's tokens are meant.": {
                    "dkey": sum(away)
                },
                "the weight has multiplied the latents of all ranks, one after the other; here the gradient is that "
                "of one hop.": [{"dweight": dweight(products[rank], each)} for each in self.places],
                "this comes of the rank's own latents and the queries of all ranks, so gradients of keys and values "
                "came home, and were folded here: fold them where they arise, and send home what has the size of a "
                "latent.": {"dweight": dweight(sum(products), mine)},
                "these are the queries of all ranks: over cp, this gradient is summed with those of all other weights, "
                "once per step, and not here.": {"dweight": dweight(sum(products))},
            }
            for text, variants in self.mistaken(rank).items():
                mistakes[text] = mistakes.get(text, []) + [{"dq": self.back(rank, *variant)[0]} for variant in variants]
            found.append(Expected.of(right, mistakes, self.rough(*NAMES)))
        return found


def travel(student, case: Case, rank: int) -> dict[str, Tensor]:
    mine, ring = _places(case, rank), Ring(case)
    student.TOKENS = case.tokens
    for name in SIZES:
        setattr(student, name.upper(), getattr(case, name))
    narrow = torch.bfloat16 if isinstance(case, Narrow) else torch.float64
    q, latent, key, dout, out = (each[..., mine, :] for each in (ring.q, ring.latent, ring.key, ring.dout, ring.out))
    q, latent, key, weight, dout = (each.to(narrow, copy=True) for each in (q, latent, key, ring.weight, dout))
    sums = torch.promote_types(narrow, torch.float32)
    keep(q=q, latent=latent, key=key, weight=weight, dout=dout)
    found: dict[str, Tensor] = {}
    if case.way != "backward":
        found |= zip(("out", "lse"), student.forward(q, latent, key, weight))
    if case.way != "forward":
        lse = ring.lse[..., mine].to(sums)
        found |= zip(NAMES, student.backward(dout, q, latent, key, weight, out.to(sums), lse))
        if sums != narrow and getattr(found["dweight"], "dtype", sums) == narrow:
            count(ROUNDED)
    return found


def expect_travel(case: Case) -> list[Expected]:
    ring = Ring(case)
    ways = [[ring.forward(rank) for rank in range(case.ranks)]] if case.way != "backward" else []
    ways += [ring.backward()] if case.way != "forward" else []
    return [
        Expected(
            {name: value for each in both for name, value in each.values.items()},
            tuple(mistake for each in both for mistake in each.mistakes),
            {name: value for each in both for name, value in each.rough.items()},
        )
        for both in zip(*ways)
    ]


def _bytes(case: Case) -> tuple[int, int, int]:
    """Of a rank's tokens: of what travels, of its gradient, and of keys and values of all heads."""
    tokens = case.batch * case.tokens // case.ranks
    shared, pairs = case.latent + case.rotated, case.heads * (case.plain + case.rotated + case.value)
    number, of_sums = (2, 4) if isinstance(case, Narrow) else (8, 8)
    return tokens * shared * number, tokens * shared * of_sums, tokens * pairs * number


def judge_travel(case: Case, rank: int, notes: Notes):
    shared, gradient, pair = _bytes(case)
    forth, back = case.way != "backward", case.way != "forward"
    most = (case.ranks - 1) * forth * shared + case.ranks * back * (shared + gradient) if case.ranks > 1 else 0
    send = "after N - 1 hops, latents have been on every rank, and after N, their gradients are home."
    if any(call.bytes > SLACK * (shared + gradient) for call in notes.of("send")):
        send = "keys and values of all heads, or their gradients, are in this message. Send what all heads share, "
        send += "expand it where it arrives, and fold gradients before they leave."
    elif isinstance(case, Narrow):
        send = "latents are in bfloat16 and can travel like that; only sums of gradients need float32."
    others = notes.of("all_gather", "all_reduce", "reduce_scatter")
    why = ({} if others else {"send": send}) | {
        "all_gather": "latents, and sums of their gradients, go around the ring; nobody needs all of them at once.",
        "all_reduce": "a gradient that travels with its latent collects the sum on its way.",
    }
    yield from sends_at_most(notes, most, why)
    if isinstance(case, Narrow) and not others and all(call.bytes <= shared for call in notes.of("send")):
        yield f"sums of gradients travel in bfloat16, and {SWALLOWED}"
    if notes.counts[ROUNDED]:
        yield f"dweight is a sum over all hops in bfloat16, and {SWALLOWED}"
    if case.ranks > 3:  # with fewer, all parts together are not much more than one
        weight = 8 * case.heads * (case.plain + case.value) * case.latent
        held = (weight + 7.5 * shared + 9 * pair) if back else (3.5 * shared + 4 * pair)
        what = (
            "At any time a rank needs the latents of one other rank, and keys and values of these alone: expand them "
        )
        yield from holds_at_most(notes, held, f"{what}when they come, and forget them afterwards.")


WIDTHS = {"plain": 6, "rotated": 4, "value": 5, "latent": 9}
CASES = (
    Case(ranks=1, way="both", batch=2, tokens=6, heads=2, **WIDTHS),
    Case(ranks=2, way="both", batch=1, tokens=24, heads=3, **WIDTHS),
    Case(ranks=3, way="both", batch=2, tokens=30, heads=2, **WIDTHS),
    Narrow(ranks=2, way="both", batch=1, tokens=16, heads=2, **WIDTHS),
    Case(ranks=4, way="forward", batch=1, tokens=32, heads=16, plain=24, rotated=8, value=16, latent=20),
    Case(ranks=6, way="forward", batch=1, tokens=192, heads=1, plain=4, rotated=2, value=4, latent=500),
    Case(ranks=6, way="backward", batch=1, tokens=192, heads=1, plain=4, rotated=2, value=4, latent=500),
    Case(ranks=4, way="backward", batch=1, tokens=32, heads=16, plain=24, rotated=8, value=16, latent=20),
)
LABS = [
    WriteLab(
        **page(__file__, "write-08-c"),
        source="step08_5d/labs/latent_ring.py",
        bodies=(1, 2),
        cases=CASES,
        run=travel,
        expect=expect_travel,
        judge=judge_travel,
    )
]
