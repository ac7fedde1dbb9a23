"""How many messages, how many bytes, and whether the result is the same."""

from common.config import TrainConfig
from common.costs.vocabulary import Message
from common.experiments.counting import Counted, counted, mean_rank, print_counted
from common.experiments.gradients import compare_with_one_process
from common.experiments.local_ranks import on_ranks
from common.experiments.training_step import Training, checked, on_every_case
from common.process_groups import Mesh
from step05_pipeline import cost, train
from step05_pipeline.experiments.tools import ORDER, SHAPE

PLACEMENTS = {"zbv": "v", "dualpipev": "v", "dualpipe": "bidirectional"}
CHUNKS = {"interleaved": 2, "breadth-first": 2, "llama3": 2}


def messages(quick: bool) -> None:
    """Messages and bytes of a step: by formula, by the log of calls, by what the TCP sockets sent; x v, / tp."""
    ranks, m = (2, 4) if quick else (4, 8)
    shape = SHAPE | {"global_batch": m, "layers": 4 * ranks, "seq_len": 128, "tie_embeddings": False}
    cases = {name: {"pp": ranks, "schedule": name} for name in ORDER}
    cases["interleaved, v 4"] = {"pp": ranks, "schedule": "interleaved", "virtual_stages": 4}
    cases["1f1b, bfloat16"] = {"pp": ranks, "schedule": "1f1b", "dtype": "bfloat16"}
    cases["1f1b, tied"] = {"pp": ranks, "schedule": "1f1b", "tie_embeddings": True}
    cases["zbv, tied"] = {"pp": ranks, "schedule": "zbv", "tie_embeddings": True}
    if not quick:
        cases["1f1b, pp 2, tp 2 with SP"] = {"pp": 2, "tp": 2, "schedule": "1f1b"}
        cases["1f1b, pp 2, tp 2 without SP"] = {"pp": 2, "tp": 2, "schedule": "1f1b", "sequence_parallel": False}
    flags = [shape | each for each in cases.values()]
    found = on_ranks(ranks, on_every_case, count_step, flags, title="messages", jobs=len(cases))
    predicted = {name: expected(each, ranks) for name, each in zip(cases, flags)}
    means = {name: mean_rank(part[index] for part in found) for index, name in enumerate(cases)}
    title = f"a step of {m} micro-batches on {ranks} ranks"
    print_counted(title, predicted, means, sockets=False)


def count_step(mesh: Mesh, flags: dict) -> Counted:
    """On a rank: what it sends in one step."""
    run = Training(train, *checked(mesh, **flags))
    return counted(run.gradients, run.mesh)


def expected(flags: dict, ranks: int) -> list[Message]:
    """Between stages, and once a step for parameters that several stages hold."""
    config, name = TrainConfig(**flags), flags["schedule"]
    model, v = config.model_config, flags.get("virtual_stages", CHUNKS.get(name, 1))
    cut = config.tp if config.sequence_parallel else 1
    size = cost.message_bytes(config.micro_batch, config.seq_len, model.hidden, config.torch_dtype.itemsize, cut)
    m = config.global_batch // config.micro_batch
    result = cost.messages(config.pp, m, size, v, PLACEMENTS.get(name, "looped"))
    if name == "dualpipe":  # every rank holds two stages, one of each copy, and each is on two ranks
        whole = cost.stage_parameters(model, 0, model.layers)
        result.append(Message("mirror", "all_reduce", 4 * 2 * whole / ranks, 1))
    elif model.tie_embeddings and name == "1f1b":  # first and last rank; a V has both ends on one
        result.append(Message("embed", "all_reduce", 4 * model.vocab * model.hidden, 2 / ranks))
    return result


FLOAT64 = SHAPE | {"hidden": 32, "ffn": 48, "seq_len": 16, "global_batch": 8, "dtype": "float64"}


def gradients(quick: bool) -> None:
    """Gradients of every schedule against one process that takes the whole global batch at once, in float64."""
    cases = [(2, name, {"pp": 2, "schedule": name}) for name in ORDER]
    if not quick:
        cases += [(4, name, {"pp": 4, "schedule": name}) for name in ORDER]
        cases += [(4, f"{name}, tied", {"pp": 4, "schedule": name, "tie_embeddings": True}) for name in ORDER]
        odd = {"pp": 4, "layers": 9, "global_batch": 3}
        cases += [(4, f"{name}, 9 layers, m 3", odd | {"schedule": name}) for name in ORDER if name != "interleaved"]
        more = {"recompute": "full", "pp": 4}
        cases += [(4, f"{name}, full recomputation", more | {"schedule": name}) for name in ("1f1b", "zb-h1")]
        both = {"pp": 2, "tp": 2}
        cases += [(4, f"{name}, pp 2, tp 2", both | {"schedule": name}) for name in ("1f1b", "zbv", "dualpipe")]
        cases += [(4, f"1f1b, dp 2, pp 2, ZeRO {stage}", {"pp": 2, "zero": stage}) for stage in (0, 1, 2, 3)]
    compare_with_one_process(train, [(size, name, FLOAT64 | flags) for size, name, flags in cases])
