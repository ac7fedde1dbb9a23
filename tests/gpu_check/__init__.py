"""`python -m tests.gpu_check`: everything that only a GPU can show, on one or several, with a report.

It needs torch, numpy, safetensors and tqdm, and nothing else of what the project depends on. To add a layout, add a
line to `LAYOUTS` in parity.py.
"""
