"""Data parallelism in its smallest form: two weights, two samples, two ranks, one step.

    torchrun --nproc_per_node 2 step02_data_parallel/two_ranks.py

With `--nproc_per_node 1` a single rank takes both samples, and arrives at the same weights. `data_parallel.py` does the
same for a real model, with a better answer to the question when to communicate.
"""

import torch
import torch.distributed as dist

SAMPLES = [([1.0, 2.0], 1.0), ([2.0, 0.0], -2.0)]  # the global batch: inputs and target of each sample


def main() -> None:
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    weights = torch.nn.Parameter(torch.tensor([1.0, 1.0]))  # the same on every rank

    for x, y in SAMPLES[rank::world_size]:  # this rank's samples
        error = weights @ torch.tensor(x) - y
        (error**2 / 2 / len(SAMPLES)).backward()  # a share of the mean over the whole global batch
    mine = weights.grad.clone()

    dist.all_reduce(weights.grad, op=dist.ReduceOp.SUM)
    with torch.no_grad():
        weights -= 0.1 * weights.grad
    print(f"rank {rank} of {world_size}: gradient {mine}, summed {weights.grad}, new weights {weights.data}\n", end="")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
