"""The answers to calculations and designs of steps 1 to 4 follow from the project's own formulas."""

import pytest
import torch

from common.costs.alpha_beta import gather_ratio
from common.costs.hardware import H100_TFLOPS
from common.costs.networks import NETWORK, NODE, NVLINK, bus_bandwidth
from common.costs.vocabulary import WIDTHS, sent
from common.counts import count_parameters
from common.presets import resolve
from step01_single_gpu.cost import saved_activations, states, total_bytes
from step01_single_gpu.memory_model.peak import predict_peak
from step02_data_parallel import cost as data
from step02_data_parallel.batch_recipe import fill
from step03_zero import cost as zero
from step04_tensor_parallel import cost as tensor
from step08_5d import cost
from tests.house.answers.exercises import check, exercise

GIB, MIB, PEAK = 2**30, 2**20, H100_TFLOPS * 1e12
LLAMA_1B, LLAMA_8B, LLAMA_70B = map(resolve, ("llama3-1b", "llama3-8b", "llama3-70b"))
PSI_1B, PSI_8B, PSI_70B = (count_parameters(model).total for model in (LLAMA_1B, LLAMA_8B, LLAMA_70B))


def test_step_1_exercise_1():
    wide, narrow = (states(LLAMA_1B, dtype) for dtype in (torch.float32, torch.bfloat16))
    sums = [sum(each.values()) / GIB for each in (narrow, wide)]
    found = [PSI_1B, *(each / GIB for each in (*wide.values(), *narrow.values()) if each), *sums]
    check(exercise(1, 1, "calculation"), *found)


def test_step_1_exercise_2():
    model, dtype = resolve("debug"), torch.float32
    peaks = {b: predict_peak(model, b, 256, dtype, accumulation=8 // b).peak / MIB for b in (8, 4, 1)}
    kept = [total_bytes(saved_activations(model, b, 256, dtype)) / MIB for b in (8, 4, 1)]
    of_loss = [2 * 4 * b * 256 * model.vocab / MIB for b in (8, 4, 1)]  # two more tensors as large as the logits
    held = {part: size / MIB for part, size in states(model, dtype).items()}
    stay = held["parameters"] + held["moments"]
    assert peaks[4] - peaks[8] / 2 == pytest.approx(stay / 2 + held["gradients"], abs=0.05)
    found = [*peaks.values(), peaks[8] / peaks[1], *kept, *of_loss, stay, held["gradients"], peaks[4] - peaks[8] / 2]
    assert sum((kept[1], of_loss[1], stay, held["gradients"])) == pytest.approx(peaks[4], abs=0.05)
    check(exercise(1, 2, "prediction"), *found)


def test_step_1_exercise_5():
    found, largest, peaks = [], {}, {}
    for recompute in ("none", "full"):
        for batch in (1, 2, 4):
            shape = LLAMA_1B, batch, 8192, torch.bfloat16
            saved = saved_activations(*shape, recompute=recompute)
            layers = ("layer inputs",) if recompute == "full" else ("attention", "mlp", "norms")
            parts = {
                "rest": sum(states(LLAMA_1B, torch.bfloat16).values()) / GIB,
                "layers": total_bytes(saved, *layers) / GIB,
                "loss": 3 * total_bytes(saved, "log-probabilities") / GIB,
            }
            peak = predict_peak(*shape, recompute=recompute, accumulation=32 // batch).peak / GIB
            peaks[recompute, batch] = peak
            assert (peak <= 80) == ((recompute, batch) != ("none", 4))
            name = largest[recompute, batch] = max(parts, key=parts.get)
            found += [peak, parts[name]]
    assert list(largest.values()) == ["rest", "layers", "layers", "rest", "loss", "loss"]
    layer = count_parameters(LLAMA_1B)
    layer = layer.attention + layer.dense_mlp
    busy = 6 * layer * 8192 / PEAK * 1e3
    assert busy > 0.93
    check(exercise(1, 5, "design"), *found, layer, busy, 80 - peaks["none", 2])


def test_step_2_exercise_1():
    found, bandwidth, buckets = [], NODE * NETWORK / 1e9, 28_000 / 25
    for gpus in (64, 1024):
        gradients, *_ = data.messages(7e9, gpus)
        in_all, latency = gradients.bytes / 1e9, 2 * (gpus - 1) * 10e-6
        bucket = in_all / bandwidth / buckets
        found += [in_all, in_all / bandwidth, bucket * 1e3, latency * 1e3, latency * buckets]
    assert 10 < 2 * 63 * 10e-6 / (found[2] / 1e3) < 11
    check(exercise(2, 1, "calculation"), 28, *found, buckets, latency / bucket)


def test_step_2_exercise_5():
    parameters, peak = round(PSI_1B, -7), 400e12  # as the command prints them
    found, steps = [parameters, 8192], []
    for gpus, micro_batch in ((512, 2), (256, 4)):
        assert (recipe := fill(4e6, 4096, gpus, micro_batch)).accumulation == 1 and recipe.samples == 1024
        tokens = micro_batch * 4096
        ratio = data.tokens_to_hide(gpus, bus_bandwidth("all_reduce", gpus), peak, 4) / tokens
        backward = data.operations(parameters, tokens)["last backward"] / peak
        step = 1.5 * backward + max(0, ratio - 1) * backward
        found += [backward, ratio, step]
        steps.append(step)
        if gpus == 512:
            found += [1.5, ratio - 1, 100 * data.exposed_share(ratio, 1)]
    check(exercise(2, 5, "design"), *found, steps[0] / steps[1])


def test_step_3_exercise_1():
    held = [sum(zero.held(PSI_70B, stage, 64, WIDTHS["bfloat16"]).values()) / GIB for stage in range(4)]
    assert [each <= 80 for each in held] == [False, False, False, True]
    check(exercise(3, 1, "calculation"), PSI_70B / GIB, 18, *held)


def test_step_3_exercise_5():
    widths, tokens, bf16 = WIDTHS["bfloat16"], 6144, torch.bfloat16
    peaks = [predict_peak(LLAMA_8B, 1, tokens, bf16, recompute=mode, accumulation=2).peak for mode in ("none", "full")]
    active, recomputed = ((each - sum(states(LLAMA_8B, bf16).values())) / GIB for each in peaks)
    room, gpus = 80 - active, (64, 16, 8)
    held = {(stage, n): sum(zero.held(PSI_8B, stage, n, widths).values()) / GIB for stage in (1, 2, 3) for n in gpus}
    assert all(held[1, n] > room and held[1, n] + recomputed < 80 for n in gpus)
    backward = data.operations(PSI_8B, tokens)["last backward"] / PEAK
    forward, gathering = backward / 2, bus_bandwidth("all_gather", 16)
    gather = sent("all_gather", 2 * PSI_8B, 16) / gathering
    networks = {n: bus_bandwidth("reduce_scatter", n) for n in gpus}
    scatters = {n: sent("reduce_scatter", 4 * PSI_8B, n) / networks[n] for n in gpus}
    needed = {n: zero.tokens_to_hide_backward(n, bus_bandwidth("all_gather", n), networks[n], PEAK) for n in gpus}
    between = {n: sent("all_reduce", 4 * PSI_8B / n, 64 // n) / NETWORK for n in (16, 8)}
    assert [scatters[n] < backward for n in gpus] == [False, True, True] and max(between.values()) < backward
    assert gather < forward and scatters[16] + between[16] - backward == pytest.approx(0.03, abs=0.005)
    assert [needed[n] < tokens for n in gpus] == [False, False, True]
    largest, layer = LLAMA_8B.vocab * LLAMA_8B.hidden, count_parameters(LLAMA_8B)
    layer = layer.attention + layer.dense_mlp
    bucket = 4 * largest / GIB  # of the embedding's or the head's gradient alone
    second = 4 * LLAMA_8B.hidden * LLAMA_8B.ffn / GIB  # the next largest bucket: they are never both of `largest`
    stage_2 = 46 + held[2, 16] + bucket + second
    borrowed = (2 + 4) * (largest + layer) / GIB  # weights and gradients of two units
    assert stage_2 < 80 and held[3, 8] + borrowed < room
    assert room - held[2, 8] - bucket - second < 2.5  # which CUDA and its allocator's gaps need
    assert 46 + held[3, 8] + borrowed == pytest.approx(stage_2 - 4, abs=0.5)
    found = [active, recomputed, *held.values(), 4 * PSI_8B / 1e9, backward, *needed.values()]
    found += [largest / 1e6, second, stage_2, forward, gather, gathering / 1e9, 2 * PSI_8B / 1e9]
    found += [
        scatters[64],
        scatters[16],
        networks[64] / 1e9,
        networks[16] / 1e9,
        249.8e9,
        bucket,
        borrowed,
        *between.values(),
    ]
    check(exercise(3, 5, "design"), *found, *(46 + each for each in (held[2, 16], held[2, 8], held[3, 8] + borrowed)))


def test_step_4_exercise_1():
    stream = 8192 * 4096 * 2
    block = sum(m.bytes * m.count for m in tensor.block_messages(tensor.Way(), 8, stream))
    time = LLAMA_8B.layers * block / NVLINK
    found = stream / 1e6, block / 1e6, LLAMA_8B.layers * block / 1e9, time * 1e3, 100 * time / 60e-3
    check(exercise(4, 1, "calculation"), *found)


def test_step_4_exercise_2():
    """What `cost.py` adds up, which other tests compare with sockets."""
    model, found = resolve("debug"), []
    for sequences in (8, 16):
        messages = tensor.messages(tensor.Way(), 2, model, 2, 256, micro_batches=sequences // 4)
        found.append(sum(m.bytes * m.count for m in messages if m.group == "tp"))
    (of_gradients,) = (
        m.bytes for m in cost.messages(model, cost.Layout(256, dp=2, tp=2, micro_batch=2)) if m.group == "replica"
    )
    assert 1.99 * found[0] < found[1] < 2 * found[0]
    check(exercise(4, 2, "prediction"), *(each / 1e6 for each in (*found, of_gradients)))


def test_step_4_exercise_5():
    stream, table = 8192 * 4096 * 2, []
    memory = [(6 / tp + 12 / 8) * PSI_8B / GIB + 53 / tp for tp in (1, 2, 4)]
    assert [each < 80 for each in memory] == [False, True, True]
    for tp in (2, 4):
        block = sum(m.bytes * m.count for m in tensor.block_messages(tensor.Way(), tp, stream))
        of_tensors = block * LLAMA_8B.layers * 8 / (8 / tp)
        of_zero = (4 + 2) * (8 / tp - 1) / (8 / tp) * PSI_8B / tp
        table += [of_tensors / 1e9, of_zero / 1e9, (of_tensors + of_zero) / 1e9]
    assert table[2] < table[5]
    widest = LLAMA_8B.head_width * (LLAMA_8B.heads + 2 * LLAMA_8B.kv_heads)
    needed = gather_ratio(2, 1, PEAK, NVLINK)  # columns with which a product takes as long as the gather before it
    check(exercise(4, 5, "design"), *memory, stream / 1e6, PSI_8B, *table, widest, needed)
