"""`python -m tests.gpu_check`: everything that only a GPU can show, on one or several, with a report.

It needs torch, numpy, safetensors, tqdm and pytest, and nothing else of what the project depends on. Its parts are the
tests of this folder, which `pytest` alone only tries on the CPU. To add a layout, add a line to `LAYOUTS`.
"""
