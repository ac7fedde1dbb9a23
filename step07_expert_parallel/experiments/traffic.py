"""What travels because experts do not: bytes of dispatch and combine, and what imbalance adds to the most of them."""

from common.collectives import record
from common.costs.vocabulary import added
from common.drawing.tables import print_table
from common.experiments.even_routing import choose_in_turn
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import on_every_case
from common.process_groups import Mesh
from step07_expert_parallel import cost
from step07_expert_parallel.experiments.layer import SHAPE, ExpertLayer

WIDTHS = {"float32": 4, "bfloat16": 2}
LAYOUTS = ((2, 1), (4, 1), (8, 1), (4, 2))  # (ep, tp) on ep ranks


def traffic(quick: bool) -> None:
    """Bytes that a rank sends for one layer of experts, by formula and by the log of calls; even choices and others."""
    rows = []
    for ranks, tp in LAYOUTS[:1] if quick else LAYOUTS:
        keys = [(dtype, evenly) for evenly in (True, False) for dtype in WIDTHS]
        cases = [SHAPE | {"ep": ranks, "tp": tp, "dtype": dtype, "evenly": evenly} for dtype, evenly in keys]
        found = on_ranks(ranks, on_every_case, send, cases, title="traffic", jobs=len(cases))
        for index, (dtype, evenly) in enumerate(keys):
            of_ranks = [part[index] for part in found]
            model, tokens, busiest = of_ranks[0][:3]
            predicted = added(cost.messages(model, tokens, ranks, WIDTHS[dtype]))["ep", "all_to_all"][1]
            sent = [each for *_, each in of_ranks]
            name = f"ep {ranks}" + f", tp {tp}" * (tp > 1) + f", {dtype}, " + ("in turn" if evenly else "by the router")
            cells = (f"{predicted:,.0f}", f"{min(sent):,}", f"{max(sent):,}", f"{sum(sent) / ranks / predicted:.4f}")
            rows.append((name, *cells, f"{max(sent) / predicted:.2f}", f"{busiest:.0%}"))
    header = ("experts are chosen", "formula", "least of a rank", "most", "mean / formula", "most / formula")
    tokens = SHAPE["micro_batch"] * SHAPE["seq_len"]
    title = f"bytes that a rank sends for a layer, forward and backward; {tokens} tokens on a rank, with tp their part"
    print_table(title, (*header, "choices of one rank's experts, most"), rows)


def send(mesh: Mesh, flags: dict) -> tuple:
    """On a rank: the model, its tokens, the share of choices that the busiest rank's experts got, and bytes sent."""
    flags = dict(flags)
    layer = ExpertLayer(mesh, choose=choose_in_turn if flags.pop("evenly") else None, **flags)
    with record() as calls:
        layer.forward()
        layer.backward()
    loads = layer.layer.router.load.view(layer.mesh.ep.size, -1).sum(1)
    shares = loads / loads.sum()  # of this rank's tokens; those of other ranks are like them
    return layer.config.model_config, layer.tokens, shares.max().item(), sum(call.bytes for call in calls)
