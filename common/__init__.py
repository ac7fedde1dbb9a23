import os

# One thread for each process, as torchrun has it: on busy cores, several threads that spin while they wait for each
# other take ten times as long, and their number decides in which order a sum is added up, so the last digits depend on
# it. PyTorch reads this when it is loaded. The user's own value wins.
os.environ.setdefault("OMP_NUM_THREADS", "1")
